"""The properties of GLM 4.7 Flash that the configuration stage needs (`config.family.Facts`). They are the same
as DeepSeek's."""

import dataclasses

from trainer.models.deepseek import facts as deepseek

FACTS = dataclasses.replace(deepseek.FACTS, family="trainer.models.glm4_moe_lite.family:FAMILY")
