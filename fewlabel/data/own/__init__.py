"""Your own images: list, check and read folders, tables, npz files and DICOM."""
