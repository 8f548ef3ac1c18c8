"""From a checkpoint to predictions: prepared networks, the engines that run them, the classifier."""
