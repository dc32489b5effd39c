"""Drafters: everything about one is in its own file or folder, and in one line here."""

from specjax.drafters.ngram import NGram

DRAFTERS = {"ngram": NGram}


def drafter_from_name(name: str, **options):
    """The registered drafter of that name, built with `options`; None, whatever they are, for `none`.

    Raises:
      ValueError: there is no such drafter; the message lists those there are.
    """
    if name == "none":
        return None
    if name not in DRAFTERS:
        raise ValueError(f"unknown drafter {name!r}; known: none, {', '.join(sorted(DRAFTERS))}")
    return DRAFTERS[name](**options)
