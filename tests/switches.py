"""Every switch that a class of transformers lacks, with what speed runs use beside them."""

from typing import Any

FASTER: dict[str, Any] = {
    "position": "rope",
    "norm": "rmsnorm",
    "mlp": "relu2",
    "qk_norm": True,
    "tied": False,
    "zero_init": True,
    "logit_softcap": 15.0,
    "value_residual": True,
    "embedding_shortcut": True,
}
