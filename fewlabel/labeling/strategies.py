"""The strategies by name, for help texts: `learn.acquisition` has the functions, and needs PyTorch."""

STRATEGIES = {
    "random": "any images, all with the same chance",
    "least-certain": "the lowest probability of the most likely class",
    "margin": "the smallest difference between the two most likely classes",
    "k-center": "cluster centres: each image far from those before it, by the model's features",
    "uncertain-diverse": "those that would change the model most, and each in another way (BADGE)",
}
USUAL = "uncertain-diverse"
