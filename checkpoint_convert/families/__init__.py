"""Model families. Each is described once; conversions in every direction follow from that.

A module describes one family or a few; modules in `_SHARED` hold what families have in common.
"""

from importlib import import_module
from pkgutil import iter_modules

from checkpoint_convert.families.description import Family

_SHARED = {"decoder", "description", "engines", "ffn", "linear", "mla", "multimodal", "vision"}
_MODULES = [
    import_module(f"{__name__}.{module.name}")
    for module in iter_modules(__path__)
    if module.name not in _SHARED
]
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for module in _MODULES
    for family in vars(module).values()
    if isinstance(family, Family)
}
"""The families by the `model_type` of their config.json."""
