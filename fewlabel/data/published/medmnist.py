"""The 2D sets of MedMNIST v2: checksums, sizes and class names, copied from the table in its package.

Yang et al., MedMNIST v2, Scientific Data 2023; https://medmnist.com. ChestMNIST is not among them, because its images
have any number of 14 labels. OrganA, OrganC and OrganS were published twice: version 3 of the package removed a few
images from the training split. Both releases are read; the papers used the first.
"""

URL = "https://zenodo.org/records/10519652/files/{name}.npz?download=1"
ORGANS = (
    "bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right", "liver", "lung-left",
    "lung-right", "pancreas", "spleen",
)  # fmt: skip

# name -> (md5 of each release, what it shows, images to train, validate and test, channels, classes)
MEDMNIST: dict[str, tuple[tuple[str, ...], str, tuple[int, int, int], int, tuple[str, ...]]] = {
    "pathmnist": (
        ("a8b06965200029087d5bd730944a56c1",),
        "colon tissue",
        (89996, 10004, 7180),
        3,
        (
            "adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa",
            "cancer-associated stroma", "colorectal adenocarcinoma epithelium",
        ),
    ),
    "dermamnist": (
        ("0744692d530f8e62ec473284d019b0c7",),
        "skin lesions",
        (7007, 1003, 2005),
        3,
        (
            "actinic keratoses and intraepithelial carcinoma", "basal cell carcinoma", "benign keratosis-like lesions",
            "dermatofibroma", "melanoma", "melanocytic nevi", "vascular lesions",
        ),
    ),
    "octmnist": (
        ("c68d92d5b585d8d81f7112f81e2d0842",),
        "retinal OCT",
        (97477, 10832, 1000),
        1,
        ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    ),
    "pneumoniamnist": (
        ("28209eda62fecd6e6a2d98b1501bb15f",),
        "chest X-rays of children",
        (4708, 524, 624),
        1,
        ("normal", "pneumonia"),
    ),
    "retinamnist": (
        ("bd4c0672f1bba3e3a89f0e4e876791e4",),
        "fundus images by grade of retinopathy",
        (1080, 120, 400),
        3,
        ("0", "1", "2", "3", "4"),
    ),
    "breastmnist": (
        ("750601b1f35ba3300ea97c75c52ff8f6",),
        "breast ultrasound",
        (546, 78, 156),
        1,
        ("malignant", "normal, benign"),
    ),
    "bloodmnist": (
        ("7053d0359d879ad8a5505303e11de1dc",),
        "blood cells",
        (11959, 1712, 3421),
        3,
        (
            "basophil", "eosinophil", "erythroblast",
            "immature granulocytes(myelocytes, metamyelocytes and promyelocytes)", "lymphocyte", "monocyte",
            "neutrophil", "platelet",
        ),
    ),
    "tissuemnist": (
        ("ebe78ee8b05294063de985d821c1c34b",),
        "kidney cortex cells",
        (165466, 23640, 47280),
        1,
        (
            "Collecting Duct, Connecting Tubule", "Distal Convoluted Tubule", "Glomerular endothelial cells",
            "Interstitial endothelial cells", "Leukocytes", "Podocytes", "Proximal Tubule Segments",
            "Thick Ascending Limb",
        ),
    ),
    "organamnist": (
        ("68e3f8846a6bd62f0c9bf841c0d9eacc", "866b832ed4eeba67bfb9edee1d5544e6"),
        "abdominal CT, axial",
        (34561, 6491, 17778),
        1,
        ORGANS,
    ),
    "organcmnist": (
        ("b9ceb9546e10131b32923c5bbeaea2b1", "0afa5834fb105f7705a7d93372119a21"),
        "abdominal CT, coronal",
        (12975, 2392, 8216),
        1,
        ORGANS,
    ),
    "organsmnist": (
        ("9ab87b696fb54e2a387ebe992d6ed5f1", "e5c39f1af030238290b9557d9503af9d"),
        "abdominal CT, sagittal",
        (13932, 2452, 8827),
        1,
        ORGANS,
    ),
}  # fmt: skip
