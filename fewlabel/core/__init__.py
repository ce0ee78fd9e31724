"""The contract between a method and whatever runs it, and its foundations. Imports no other folder of the package."""
