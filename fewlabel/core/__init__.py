"""The contract between a method and whatever runs it, and what it stands on. Imports nothing else of the package."""
