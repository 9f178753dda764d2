"""mtpc inside transformers: `model.generate(**inputs, custom_generate=Generator(model))`.

Its public name is `mtpc.transformers`; see docs/embedding-transformers.md.
"""

from mtpc.integrations.transformers.fields import FIELDS, Field
from mtpc.integrations.transformers.generator import Generator, generate
from mtpc.integrations.transformers.processors import READERS

__all__ = ["FIELDS", "READERS", "Field", "Generator", "generate"]
