"""The short model card, which `save_pretrained` writes by default. `bkn_zoo.publishing` writes the long one."""

import re

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.errors import InputError

SHORT_CARD = """\
---
{license}library_name: bkn_zoo
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


def check_license(license: str | None) -> None:
    """Refuse what is not an identifier of the Hub, before hours of training."""
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        raise InputError(f"license is {license!r}: use an identifier of the Hub, such as mit, cc-by-4.0 or other.")


def short_card(config: Config, name: str, license: str | None = None) -> str:
    """README.md of a checkpoint, from its config alone. It names a licence only if one is given."""
    check_license(license)
    return SHORT_CARD.format(config=config, name=name, license=f"license: {license}\n" if license else "")


def license_of(card: str) -> str | None:
    """The licence in the metadata of a card."""
    metadata = card.split("---\n")[1] if card.startswith("---\n") else ""
    found = re.search(r"^license: ([a-z0-9.+-]+)$", metadata, re.MULTILINE)
    return found[1] if found else None


def is_short_card(text: str, config: Config) -> bool:
    """Whether a card is the short card of this config, with any name and licence."""
    title = re.search("^# (.*)$", text, re.MULTILINE)
    return title is not None and text == short_card(config, title[1], license_of(text))
