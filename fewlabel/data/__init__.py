"""Images: data sets, their views, and who holds which of them with or without labels."""
