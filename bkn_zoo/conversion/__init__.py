"""From batch normalization to BKN."""

from bkn_zoo.conversion.batchnorm import load_batchnorm_weights

__all__ = ["load_batchnorm_weights"]
