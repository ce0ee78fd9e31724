"""The data sets of the papers: download, verify and read the files as they are published."""
