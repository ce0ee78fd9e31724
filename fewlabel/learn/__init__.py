"""Parts that the methods share: the training loop, optimizers, losses, pseudo-labels, weights of an average."""
