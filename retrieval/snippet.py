"""The few words of an article that a search result shows."""


def snippet(summary: str, text: str, characters: int) -> str:
    """The beginning of the summary, or of the text where there is none: one line, at most `characters` long.

    Cut at a word and marked with an ellipsis if anything is left out.
    """
    source = summary if summary.strip() else text
    beginning = source[: 8 * characters]  # articles are long, and most of one would be split for nothing
    line = " ".join(beginning.split())
    if len(line) <= characters and len(beginning) < len(source):
        line = " ".join(source.split())
    if len(line) <= characters:
        return line
    cut = line[:characters]
    at_word = cut[: cut.rfind(" ")] if " " in cut else cut[:-1]
    return at_word.rstrip(" ,;:") + "…"
