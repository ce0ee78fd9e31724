"""The published data sets by name: their files, checksums, addresses and readers."""

from functools import partial

from fewlabel.data.published.arrays import cifar_binary, cifar_python, fashion_mnist, medmnist, svhn
from fewlabel.data.published.files import DatasetSource, Edition, PublishedFile
from fewlabel.data.published.medical import ham10000, isic2018, kept_slices, rsna_ich
from fewlabel.data.published.medmnist import MEDMNIST, URL

S3 = "https://isic-challenge-data.s3.amazonaws.com/2018/"
TASK3 = "ISIC2018_Task3_Training"
METADATA = PublishedFile("HAM10000_metadata.csv", instead=("HAM10000_metadata",))


def fashion_file(name: str, md5: str, unpacked: str) -> PublishedFile:
    """Describe a file by its md5, and by the md5 of what is packed in it."""
    url = f"http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{name}"
    return PublishedFile(name, url, (md5, unpacked), instead=(name.removesuffix(".gz"),))


def cifar_file(name: str, md5: str, folder: str = "", **members: str) -> PublishedFile:
    """Describe an archive, and the folder that it unpacks to if torchvision leaves one, with the md5 of its members."""
    url, instead = f"https://www.cs.toronto.edu/~kriz/{name}", (folder,) if folder else ()
    return PublishedFile(name, url, (md5,), instead, tuple(members.items()))


def svhn_file(name: str, md5: str) -> PublishedFile:
    return PublishedFile(name, f"http://ufldl.stanford.edu/housenumbers/{name}", (md5,))


def medmnist_source(name: str) -> DatasetSource:
    md5, what, (train, validation, test), channels, classes = MEDMNIST[name]
    file = PublishedFile(f"{name}.npz", URL.format(name=name), md5)
    colour = "colour" if channels == 3 else "grey"
    about = f"MedMNIST: {what}, {train:,} + {validation:,} + {test:,} {colour} 28x28, {len(classes)} classes"
    return DatasetSource((Edition((file,), partial(medmnist, classes=classes)),), about, ("medmnist",))


CIFAR10 = [f"data_batch_{number}" for number in range(1, 6)]
CIFAR = {
    "cifar10": (
        Edition(
            (cifar_file("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
            partial(
                cifar_binary,
                folder="cifar-10-batches-bin",
                train=[f"{batch}.bin" for batch in CIFAR10],
                test="test_batch.bin",
                names="batches.meta.txt",
                coarse=0,
            ),
        ),
        Edition(
            (
                cifar_file(
                    "cifar-10-python.tar.gz",
                    "c58f30108f718f92721af3b95e74349a",
                    "cifar-10-batches-py",
                    data_batch_1="c99cafc152244af753f735de768cd75f",
                    data_batch_2="d4bba439e000b95fd0a9bffe97cbabec",
                    data_batch_3="54ebc095f3ab1f0389bbae665268c751",
                    data_batch_4="634d18415352ddfa80567beed471001a",
                    data_batch_5="482c414d41f54cd18b22e5b47cb7c3cb",
                    test_batch="40351d587109b95175f43aff81a1287e",
                    **{"batches.meta": "5ff9c542aee3614f3951f8cda6e48888"},
                ),
            ),
            partial(
                cifar_python,
                folder="cifar-10-batches-py",
                train=CIFAR10,
                test="test_batch",
                meta="batches.meta",
                fine="",
            ),
        ),
    ),
    "cifar100": (
        Edition(
            (cifar_file("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
            partial(
                cifar_binary,
                folder="cifar-100-binary",
                train=["train.bin"],
                test="test.bin",
                names="fine_label_names.txt",
                coarse=1,
            ),
        ),
        Edition(
            (
                cifar_file(
                    "cifar-100-python.tar.gz",
                    "eb9058c3a382ffc7106e4002c42a8d85",
                    "cifar-100-python",
                    train="16019d7e3df5f24257cddd939b257f8d",
                    test="f0ef6b0ae62326f3e7ffdfab6717acfc",
                    meta="7973b15100ade9c7d40fb424638fde48",
                ),
            ),
            partial(cifar_python, folder="cifar-100-python", train=["train"], test="test", meta="meta", fine="fine_"),
        ),
    ),
}

PUBLISHED: dict[str, DatasetSource] = {
    "fashion-mnist": DatasetSource(
        (
            Edition(
                (
                    fashion_file(
                        "train-images-idx3-ubyte.gz",
                        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                    ),
                    fashion_file(
                        "train-labels-idx1-ubyte.gz",
                        "25c81989df183df01b3e8a0aad5dffbe",
                        "9018921c3c673c538a1fc5bad174d6f9",
                    ),
                    fashion_file(
                        "t10k-images-idx3-ubyte.gz",
                        "bef4ecab320f06d8554ea6380940ec79",
                        "8181f5470baa50b63fa0f6fddb340f0a",
                    ),
                    fashion_file(
                        "t10k-labels-idx1-ubyte.gz",
                        "bb300cfdad3c16e7a12a480ee83cd310",
                        "15d484375f8d13e6eb1aabb0c3f46965",
                    ),
                ),
                fashion_mnist,
            ),
        ),
        "clothes, 60,000 + 10,000 grey 28x28, 10 classes",
        ("FashionMNIST/raw",),  # where torchvision leaves it
    ),
    "cifar10": DatasetSource(CIFAR["cifar10"], "photographs, 50,000 + 10,000 colour 32x32, 10 classes"),
    "cifar100": DatasetSource(CIFAR["cifar100"], "photographs, 50,000 + 10,000 colour 32x32, 100 classes"),
    "svhn": DatasetSource(
        (
            Edition(
                (
                    svhn_file("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
                    svhn_file("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
                ),
                svhn,
            ),
        ),
        "house numbers, 73,257 + 26,032 colour 32x32, 10 classes",
        ("SVHN",),
    ),
    "isic2018": DatasetSource(
        (
            Edition(
                (
                    PublishedFile(f"{TASK3}_Input.zip", f"{S3}{TASK3}_Input.zip", instead=(f"{TASK3}_Input",)),
                    PublishedFile(
                        f"{TASK3}_GroundTruth.zip",
                        f"{S3}{TASK3}_GroundTruth.zip",
                        instead=(f"{TASK3}_GroundTruth.csv", f"{TASK3}_GroundTruth"),
                    ),
                    PublishedFile(f"{TASK3}_LesionGroupings.csv", f"{S3}{TASK3}_LesionGroupings.csv"),
                ),
                isic2018,
            ),
            Edition((PublishedFile("images.zip", instead=("images",)), METADATA), ham10000),
            Edition(
                (
                    PublishedFile("HAM10000_images_part_1.zip", instead=("HAM10000_images_part_1",)),
                    PublishedFile("HAM10000_images_part_2.zip", instead=("HAM10000_images_part_2",)),
                    METADATA,
                ),
                ham10000,
            ),
        ),
        "skin lesions (HAM10000), 10,015 colour images, 7 classes; by default split 70-10-20 by lesion",
        ("ham10000",),
    ),
    "rsna-ich": DatasetSource(
        tuple(
            Edition(
                (PublishedFile(stage, instead=(f"{stage}_images",)), PublishedFile(f"{stage}.csv")),
                rsna_ich,
                kept_slices,
            )
            for stage in ("stage_2_train", "stage_1_train")
        ),
        "brain haemorrhages (RSNA 2019, by hand from Kaggle), grey CT, 5 classes; by default split 70-10-20 by patient",
        ("rsna-intracranial-hemorrhage-detection",),
        "https://www.kaggle.com/c/rsna-intracranial-hemorrhage-detection",
    ),
    **{name: medmnist_source(name) for name in MEDMNIST},
}

REFUSED = {"chestmnist": "its images have any number of 14 labels, and every method here needs exactly one per image"}
