"""From a recipe and a data set to a trained network."""
