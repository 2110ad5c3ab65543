"""transformers' custom generate: model.generate(..., custom_generate=THIS_FOLDER'S_PARENT,
trust_remote_code=True).

`python -m tools.hub_repository FOLDER` writes the same for the hub.
"""

try:
    from token_recycling.generate import Generate
except ImportError:  # not installed: only where the checkout is on the Python path
    from model.generate import Generate

ATTRIBUTE = "_token_recycling_generate"  # of a model: holds its methods


def generate(model, *, method="dynamic", start="hot", method_settings=None, **arguments):
    """Generate by one of the library's methods, whose state is kept with the model.

    Args:
        method, start, method_settings: as `Generate` takes them.
        arguments: as `generate` takes them.
    """
    methods = vars(model).setdefault(ATTRIBUTE, {})
    key = (method, start, repr(method_settings))
    decoding = methods.setdefault(key, Generate(method, start=start, **(method_settings or {})))
    return model.generate(custom_generate=decoding, **arguments)
