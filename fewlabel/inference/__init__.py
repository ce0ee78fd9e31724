"""A trained model in use: its card, predictions and exports."""
