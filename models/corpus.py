"""Text that every Python installation holds, as questions and answers in four domains: the tiny target's corpus.

    code         functions and small classes of the standard library, asked for by signature and docstring
    prose        docstrings, long comments and the language manual in `pydoc_data`, asked for by name
    chat         requests in everyday sentences, answered with lists, summaries and comparisons made from docstrings
    arithmetic   word problems and sums from a seeded generator, worked step by step in words and digits

Nothing is stored: `build` reads the standard library of the Python that runs it, so a corpus is a function of
(Python version, seed).  A document is held out by the hash of its source file, topic or problem number; whatever
was made from one file is held out or trained on together.  As a program it writes questions as prompts files, one a
domain, for drafters to be trained on (or, held out, measured on):

    python -m models.corpus FOLDER --per-domain 1000 [--skip N] [--held-out]

Test: `tests/test_train_tiny_target.py`.
"""

import argparse
import ast
import hashlib
import inspect
import json
import random
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from models import arithmetic

DOMAINS = ("arithmetic", "code", "prose", "chat")
PROBLEMS = 16_000
HELD_OUT = 25  # one source in so many
LONGEST = 1_400  # characters of an answer
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__", "pydoc_data"}


@dataclass(frozen=True)
class Document:
    """One exchange; `source` is what it was made from, the unit of the held-out split."""

    domain: str
    source: str
    question: str
    answer: str

    @property
    def held_out(self) -> bool:
        return int.from_bytes(hashlib.sha256(self.source.encode()).digest()[:4], "big") % HELD_OUT == 0


@dataclass(frozen=True)
class Entry:
    """A function, method or class of one file; `head` is its definition line, `doc` its docstring or ''."""

    name: str
    kind: str
    head: str
    doc: str
    code: str

    @property
    def summary(self) -> str:
        """The docstring's first sentence, without its full stop."""
        paragraph = " ".join(self.doc.split("\n\n")[0].split())
        return re.split(r"(?<=[a-z)`'\"])\. |\.$", paragraph)[0]


def build(seed: int = 0, limit: int | None = None) -> list[Document]:
    """All documents, each once, in a fixed order; `limit` takes so many files, topics and problems only."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    files = {".".join(path.with_suffix("").parts): root / path for path in paths if not SKIPPED & set(path.parts)}
    documents: list[Document] = []
    for name in by_hash(files, limit):
        module = name.removesuffix(".__init__")
        documents += from_file(files[name], module, random.Random(f"{seed} {module}"))
    documents += from_topics(seed, limit)
    for number in range(PROBLEMS if limit is None else limit):
        rng = random.Random(f"{seed} problem {number}")
        documents.append(Document("arithmetic", f"problem {number}", *arithmetic.problem(rng)))
    return list({(d.question, d.answer): d for d in reversed(documents)}.values())[::-1]


def write_prompts(folder: Path, per_domain: int, skip: int = 0, held_out: bool = False, seed: int = 0) -> list[Path]:
    """Write folder/DOMAIN.jsonl for every domain: up to `per_domain` different questions in a seeded order.

    The first `skip` of that order are left out.  ValueError where that leaves nothing.
    """
    if per_domain < 1 or skip < 0:
        raise ValueError(f"per_domain must be at least 1 and skip at least 0, got {per_domain} and {skip}")
    folder.mkdir(parents=True, exist_ok=True)
    documents, paths = [d for d in build(seed) if d.held_out == held_out], []
    for domain in DOMAINS:
        questions = list(dict.fromkeys(d.question for d in documents if d.domain == domain))
        random.Random(f"{seed} prompts {domain}").shuffle(questions)
        chosen = list(enumerate(questions))[skip : skip + per_domain]
        if not chosen:
            raise ValueError(f"the {len(questions)} questions of {domain} leave none behind the first {skip}")
        rows = [json.dumps({"id": i, "prompt": question}) for i, question in chosen]
        paths.append(folder / f"{domain}.jsonl")
        paths[-1].write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return paths


def by_hash(names: Iterable[str], limit: int | None) -> list[str]:
    """The first `limit` names in the order of their hashes: a sample that is the same everywhere."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:limit]


def from_file(path: Path, module: str, rng: random.Random) -> Iterator[Document]:
    """The documents of one source file; none where it is not UTF-8 or not Python."""
    try:
        text = path.read_text("utf-8")
        with warnings.catch_warnings(action="ignore"):  # the library's own invalid escapes
            tree = ast.parse(text)
    except (UnicodeDecodeError, SyntaxError):
        return
    about = inspect.cleandoc(ast.get_docstring(tree) or "")
    entries = list(entries_of(tree, text.splitlines(), ""))
    for entry in entries:
        if 60 <= len(entry.code) <= LONGEST:
            yield Document("code", module, *code_exchange(entry, module, rng))
    named = [(f"`{entry.name}` in the module `{module}`", entry.doc) for entry in entries]
    for title, body in [(f"the module `{module}`", about), *named]:
        for part, passage in enumerate(passages(body)):
            yield Document("prose", module, prose_question(title, part, rng), passage)
    for comment in re.findall(r"(?:^[ \t]*#[ \t]?.*\n){4,}", text, flags=re.M):
        note = textwrap.dedent(re.sub(r"^[ \t]*#", "", comment, flags=re.M))
        for part, passage in enumerate(passages(note)):
            yield Document("prose", module, prose_question(f"a note in the code of `{module}`", part, rng), passage)
    known = [entry for entry in entries if 20 <= len(entry.summary) <= 200]
    for _ in range(2 * len(known)):
        yield Document("chat", module, *chat_exchange(module, about, known, rng))


def entries_of(tree: ast.AST, lines: list[str], prefix: str) -> Iterator[Entry]:
    """Functions, classes and methods in order, with decorators and comments of their own."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        code = textwrap.dedent("\n".join(lines[first : node.end_lineno]))
        kind = "class" if isinstance(node, ast.ClassDef) else "method" if prefix else "function"
        doc = inspect.cleandoc(ast.get_docstring(node) or "")
        yield Entry(prefix + node.name, kind, head_of(node), doc, code)
        if isinstance(node, ast.ClassDef):
            yield from entries_of(node, lines, f"{node.name}.")


def head_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """A definition's first line, without its colon."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in [*node.bases, *node.keywords])
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{'async ' * isinstance(node, ast.AsyncFunctionDef)}def {node.name}({ast.unparse(node.args)}){returns}"


def from_topics(seed: int, limit: int | None) -> Iterator[Document]:
    """The chapters of the language manual, passage by passage."""
    from pydoc_data.topics import topics

    for topic in by_hash(topics, limit):
        rng = random.Random(f"{seed} topic {topic}")
        for part, passage in enumerate(passages(topics[topic], shortest=60)):
            yield Document("prose", f"topic {topic}", prose_question(f"{topic!r} in Python", part, rng), passage)


def passages(text: str, shortest: int = 160) -> Iterator[str]:
    """Whole paragraphs, gathered into passages of up to LONGEST characters; longer paragraphs are left out."""
    gathered = ""
    for paragraph in [*re.split(r"\n\s*\n", text.strip()), None]:
        if gathered and (paragraph is None or len(gathered) + len(paragraph) > LONGEST):
            if shortest <= len(gathered) <= LONGEST:
                yield gathered.strip()
            gathered = ""
        gathered += (paragraph or "").rstrip() + "\n\n"


def code_exchange(entry: Entry, module: str, rng: random.Random) -> tuple[str, str]:
    """A request for a definition, in the ways people ask for one, and its source in a fence."""
    name, what = entry.name.rpartition(".")[2], entry.summary
    head = entry.head if len(entry.head) < 200 else f"{entry.head.split('(')[0]}(...)"
    styles = [
        f"Write the {entry.kind} `{entry.name}` of the module `{module}`.",
        f"Write a Python {entry.kind} that begins like this:\n\n{head}:",
        f"Complete the {entry.kind} below.\n\n{head}:",
        f"How would you write `{head}` in a module `{module}`?",
    ]
    if what:
        verb = what[0].lower() + what[1:]
        styles = [
            f"Write a Python {entry.kind} `{head}`. {what}.",
            f"Write `{head}`, which does this: {verb}.",
            f"Write a Python {entry.kind} that begins like this:\n\n{head}:\n\n{what}.",
            f'Fill in this Python {entry.kind}:\n\n```python\n{head}:\n    """{what}."""\n```',
            f'Complete the {entry.kind} below.\n\n{head}:\n    """{what}."""',
            f"Implement a Python {entry.kind} `{name}` for this purpose: {verb}. It belongs to `{module}`.",
            rng.choice(styles),
        ]
    lead = rng.choice(["", "", f"Here is `{name}`:\n\n", f"The {entry.kind} `{name}` can be written like this:\n\n"])
    return rng.choice(styles), f"{lead}```python\n{entry.code.rstrip()}\n```"


def prose_question(title: str, part: int, rng: random.Random) -> str:
    """A request for an explanation, or for its continuation."""
    if part:
        title = f"{title}, part {part + 1}"
    asked = (
        "Explain {}.",
        "Please explain {}.",
        "Describe {}.",
        "Tell me about {}.",
        "What does one need to know of {}?",
        "Give me a clear account of {}.",
        "Could you explain {} to me?",
        "Write a few paragraphs about {}.",
    )
    return rng.choice(asked).format(title)


def chat_exchange(module: str, about: str, known: list[Entry], rng: random.Random) -> tuple[str, str]:
    """A request in everyday words about a few definitions of one module, and an answer made from their summaries."""
    chosen = rng.sample(known, min(len(known), rng.choice([1, 2, 3, 3, 4, 5])))
    one, count = chosen[0], NUMBERS[len(chosen)]
    lines = [f"`{e.name}`: {e.summary}." for e in chosen]
    sentences = [f"{rng.choice(OPENINGS)} `{e.name}`. {e.summary}." for e in chosen]
    many = "things" if len(chosen) > 1 else "thing"
    kinds = [
        (f"List {count} useful {many} in the module `{module}`.", numbered(lines)),
        (f"Name {count} {many} that `{module}` offers and say what each one does.", numbered(lines)),
        (f"Suggest {count} {many} from `{module}` for a beginner.", "\n\n".join(sentences)),
        (f"Summarize `{one.name}` in one sentence.", f"{one.summary}."),
        (f"What is `{one.name}` for, and where do I find it?", f"{one.summary}. You find it in `{module}`."),
        (f"I need this: {one.summary[0].lower() + one.summary[1:]}. What can I use?", used(one, module, rng)),
        (f"Which {one.kind} has this purpose: {one.summary}?", used(one, module, rng)),
    ]
    if len(chosen) > 1:
        two = chosen[1]
        kinds.append((f"Compare `{one.name}` with `{two.name}`.", compared(one, two, module, rng)))
        kinds.append(
            (f"Explain the difference between `{one.name}` and `{two.name}`.", compared(one, two, module, rng))
        )
    if about and len(about.split("\n\n")[0]) < 500:
        first = " ".join(about.split("\n\n")[0].split())
        plan = f"{first}\n\nI would begin with these:\n\n{numbered(lines)}\n\n{rng.choice(CLOSINGS)}"
        kinds += [(f"Give me a plan for getting to know `{module}`.", plan), (f"How do I start with `{module}`?", plan)]
    question, answer = rng.choice(kinds)
    if rng.random() < 0.5:
        story = " ".join(rng.sample(STORIES, rng.choice([1, 2, 3])))
        question = f"{story} {question} {rng.choice(WISHES)}".strip()
        answer = f"{rng.choice(GREETINGS)}{answer}"
    return question, answer


def numbered(lines: list[str]) -> str:
    """Lines as a numbered list."""
    return "\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1))


def used(entry: Entry, module: str, rng: random.Random) -> str:
    """How one entry is written."""
    more = f"\n\nIt is written like this:\n\n```python\n{entry.head}\n```" if len(entry.head) < 120 else ""
    return f"{rng.choice(OPENINGS)} the {entry.kind} `{entry.name}` of `{module}`.{more}"


def compared(one: Entry, two: Entry, module: str, rng: random.Random) -> str:
    """What sets two entries of a module apart."""
    start = rng.choice(["Both belong to", "You find both in", "They are neighbors in"])
    return (
        f"{start} `{module}`, but they serve different ends.\n\nThe {one.kind} `{one.name}`: {one.summary}.\n\n"
        f"The {two.kind} `{two.name}`: {two.summary}."
    )


NUMBERS = ("no", "one", "two", "three", "four", "five")
OPENINGS = (
    "You can use",
    "I would take",
    "Have a look at",
    "A good choice is",
    "Try",
    "What you want is",
    "Start with",
)
CLOSINGS = (
    "Take them one after another, and try each in a small program of your own.",
    "With these you can do most of the everyday work. The rest can wait until you need it.",
    "Read the documentation of each before you use it, and keep your first tests short.",
    "If one of them does not do what you expect, print its result and look at it closely.",
)
STORIES = (
    "I am writing a small program for the fire brigade of our village, and evenings are the only time I have.",
    "My cousin and I use one old computer for everything, and our files are in no order at all.",
    "I teach a class of twelve, and most of them have never written a program before.",
    "Since Monday I work in a new office, and everybody there seems to know Python already.",
    "I have looked at the manual twice and understood less the second time.",
    "We want to put a catalog of old postcards on the web, and it has to be finished by spring.",
    "I drove a taxi for ten years, and now I am learning to program because I enjoy it.",
    "My friend says that it is easy, but I do not want to get it wrong.",
    "There is no money for a new machine, and the old one takes its time.",
    "I keep a small shop, and every night I add up the sales by hand.",
    "My niece asks me questions that I cannot answer, and she notices when I guess.",
    "The next meeting is in two weeks, and I want to be prepared.",
)
WISHES = (
    "Please keep it short.",
    "Please explain it in plain words.",
    "What would you do?",
    "I would be glad of an example.",
    "Thank you!",
    "",
)
GREETINGS = ("", "", "Of course. ", "Gladly. ", "That is a good question. ", "Here is what I would do. ", "Certainly. ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write questions of the tiny target's corpus as prompts files.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-domain", type=int, default=1000, metavar="N")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N of a domain")
    parser.add_argument("--held-out", action="store_true", help="of sources that no tiny network was trained on")
    options = parser.parse_args()
    try:
        print(*write_prompts(options.folder, options.per_domain, options.skip, options.held_out), sep="\n")
    except (OSError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")
