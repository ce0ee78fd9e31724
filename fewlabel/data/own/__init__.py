"""Images of your own: folders, tables, npz files and DICOM."""
