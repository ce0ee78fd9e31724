"""Images: load data sets, make views of them, and decide who holds which image with or without its label."""
