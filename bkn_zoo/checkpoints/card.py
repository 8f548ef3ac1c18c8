"""The short model card, which `save_pretrained` writes by default. `bkn_zoo.publishing` writes the long one."""

import re

from bkn_zoo.checkpoints.config import Config

SHORT_CARD = """\
---
license: apache-2.0
library_name: bkn_zoo
pipeline_tag: image-classification
tags:
- batch-kalman-normalization
- {config.architecture}
---

# {name}

`{config.architecture}` with {config.num_classes} classes: a checkpoint of bkn_zoo, Batch Kalman Normalization (Wang,
Peng, Luo, Wang and Lin, 2018) in PyTorch. Its config.json holds what is known of its training and its accuracy.

```python
import bkn_zoo

model = bkn_zoo.from_pretrained("{name}")  # or by the path of its folder, or "owner/{name}" on the Hub
```
"""


def short_card(config: Config, name: str) -> str:
    """README.md of a checkpoint, from its config alone."""
    return SHORT_CARD.format(config=config, name=name)


def is_short_card(text: str, config: Config) -> bool:
    """Whether a card is the short card of this config, with any name."""
    title = re.search("^# (.*)$", text, re.MULTILINE)
    return title is not None and text == short_card(config, title[1])
