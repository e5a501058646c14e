"""The corpus: the Python language reference, cut into passages short enough to be one idea.

Decided here: where a text is cut (headings first, then paragraphs), what each passage is called,
and which copy of a text that several topics repeat is kept. Not decided here: what becomes of the
passages. Invariant: the same topics give the same passages, with the same ids, in the same order,
in every process; nothing depends on hashing order, locale or time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

MAX_TOKENS = 190
"""A paragraph that would take a passage over this starts the next one.

Counted in words and punctuation marks, and not in words alone: the reference is full of code, where
a line can be one word and twenty marks, and an encoder reads 256 word pieces and no more. In prose
it is 100 to 150 words.
"""
MIN_TOKENS = 30
"""A rest of a section shorter than this joins the passage before it: alone it means too little."""

_TOKEN = re.compile(r"\w+|[^\w\s]")
_TABLE_RULE = re.compile(r"[-=+|~*]{3,}")
_UNDERLINES = "*=-~"


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of one section of the reference."""

    id: str
    """`<topic>-<8 hex digits of the text>`: an edit elsewhere in the topic does not change it."""
    topic: str
    """Key in `pydoc_data.topics.topics`: what `help()` would be asked for."""
    title: str
    """Heading of the section it stands in."""
    text: str
    """Paragraphs as they stand in the reference, blank lines between them."""

    @property
    def reading(self) -> str:
        """The title and the text as an encoder should read them: one line, no table rules."""
        return " ".join(_TABLE_RULE.sub(" ", f"{self.title}. {self.text}").split())


def python_reference() -> list[Passage]:
    """Cut the reference of the running Python; some 550 passages."""
    from pydoc_data.topics import topics

    return cut_topics(topics)


def cut_topics(topics: Mapping[str, str]) -> list[Passage]:
    """Cut `topics` (key → text) into passages, ordered by topic and then as they are read.

    Long topics contain shorter ones word for word ("compound" holds "if", "while", "try" …). Of
    equal passages the one of the shortest topic is kept: its name is the most specific.
    """
    seen: set[tuple[str, str]] = set()
    by_topic: dict[str, list[Passage]] = {}
    for topic in sorted(topics, key=lambda name: (len(topics[name]), name)):
        kept = by_topic.setdefault(topic, [])
        for title, body in _sections(topics[topic]):
            for text in _pieces(body):
                if (title, text) not in seen:
                    seen.add((title, text))
                    kept.append(Passage(_passage_id(topic, title, text), topic, title, text))
    return [passage for topic in sorted(by_topic) for passage in by_topic[topic]]


def corpus_digest(passages: Iterable[Passage]) -> str:
    """Return a hex digest of all that an encoder is shown, in order."""
    digest = hashlib.sha256()
    for passage in passages:
        for part in (passage.id, passage.reading):
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


def _passage_id(topic: str, title: str, text: str) -> str:
    digest = hashlib.sha256(f"{title}\n{text}".encode())
    return f"{topic}-{digest.hexdigest()[:8]}"


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield (heading, body) of each section with a body; a heading is a line with an underline."""
    lines = text.splitlines()
    title = ""
    body: list[str] = []
    number = 0
    while number < len(lines):
        if number + 1 < len(lines) and _is_heading(lines[number], lines[number + 1]):
            if any(map(str.strip, body)):
                yield title, "\n".join(body)
            title, body = lines[number].strip(), []
            number += 2
        else:
            body.append(lines[number].rstrip())
            number += 1
    if any(map(str.strip, body)):
        yield title, "\n".join(body)


def _is_heading(line: str, underline: str) -> bool:
    return (
        bool(line)
        and not line[0].isspace()
        and len(underline) >= len(line)
        and underline[0] in _UNDERLINES
        and underline == underline[0] * len(underline)
    )


def _pieces(body: str) -> list[str]:
    """Pack the paragraphs of a section into pieces of at most `MAX_TOKENS`, in order."""
    pieces: list[str] = []
    size = 0
    for paragraph in _paragraphs(body):
        more = _size(paragraph)
        if pieces and size + more <= MAX_TOKENS:
            pieces[-1] = f"{pieces[-1]}\n\n{paragraph}"
            size += more
        else:
            pieces.append(paragraph)
            size = more
    if len(pieces) > 1 and size < MIN_TOKENS:
        rest = pieces.pop()
        pieces[-1] = f"{pieces[-1]}\n\n{rest}"
    return pieces


def _paragraphs(body: str) -> Iterator[str]:
    """Yield the paragraphs; one over `MAX_TOKENS` (a table, a grammar) is cut between lines."""
    for paragraph in re.split(r"\n\s*\n", body.strip("\n")):
        lines: list[str] = []
        size = 0
        for line in paragraph.splitlines():
            more = _size(line)
            if lines and size + more > MAX_TOKENS:
                yield "\n".join(lines)
                lines, size = [], 0
            lines.append(line)
            size += more
        yield "\n".join(lines)


def _size(text: str) -> int:
    return len(_TOKEN.findall(_TABLE_RULE.sub(" ", text)))
