"""Text of a corpus made safe to look at: nothing in it moves a cursor, hides, or turns the line around."""


def visible(text: str, keep: str = "") -> str:
    r"""The text with each character that cannot be printed as itself spelled as Python spells it.

    That is control characters (terminal escape sequences begin with one), directions, separators other than the
    space, and lone surrogates; those in `keep` stay.

    >>> print(visible("\x1b[2J\u202eevil\n", keep="\n"), end="")
    \x1b[2J\u202eevil
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else repr(character)[1:-1] for character in text
    )
