"""transformers' custom generate: model.generate(..., custom_generate=THIS_FOLDER'S_PARENT, trust_remote_code=True)."""

try:
    from token_recycling.transformers_generate import Generate
except ImportError:  # not installed: only where the checkout is on the Python path
    from model.transformers_generate import Generate

KEPT = "_token_recycling_generate"  # the attribute of a model that its methods are kept as


def generate(model, *, method="recycling", start="hot", method_settings=None, streamer=None, **arguments):
    """What `generate` would give, by Token Recycling or another method; its state stays with the model.

    Args:
        method, start, method_settings: as `Generate` takes them.
        streamer, arguments: as `generate` takes them.
    """
    kept = vars(model).setdefault(KEPT, {})
    key = (method, start, repr(method_settings))
    own = kept.setdefault(key, Generate(method, start=start, **(method_settings or {})))
    return model.generate(custom_generate=own, streamer=streamer, token_streamer=streamer, **arguments)
