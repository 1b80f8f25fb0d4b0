"""The best items of a set, whoever runs the model."""
