"""What a target reads and writes: prompts files, the tokenizer, the chat template and the stop ids.

A measured number depends on the exact prompt ids and on where an answer ends, so nothing here is guessed: a row without
text, an id used twice or a model folder without a chat template is a named error, and the sources that were used are
attributes.  A chat template is a stranger's program.  It runs in jinja2's immutable sandbox, away from files and code,
with the settings of `transformers`, so that the ids are those a server would see.  Test: `tests/test_text.py`.
"""

import hashlib
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from importlib.metadata import version
from numbers import Integral
from pathlib import Path
from typing import Any

PROMPT_DOMAINS = ("arithmetic", "code", "instructions", "chat")
RANGE_BUDGET = 1_000_000


class TextError(ValueError):
    """A prompts file, tokenizer or chat template that cannot be used as it stands."""


@dataclass(frozen=True)
class Prompt:
    """One user message; `id` starts with the domain and is unique over all files read together."""

    id: str
    domain: str
    text: str


def builtin_prompts() -> list[Path]:
    """The four prompts files of the project: two constrained domains, then two open-ended ones."""
    return [Path(__file__).parent / "prompts" / f"{domain}.jsonl" for domain in PROMPT_DOMAINS]


def read_prompts(
    paths: Sequence[str | Path], *, domains: Sequence[str] | None = None, per_domain: int | None = None
) -> list[Prompt]:
    """All prompts of some JSONL files, in file order.

    A row is `{"turns": [first, ...]}` (the first turn is used), `{"prompt": text}` or `{"question": text}`, with an
    optional `id` (string or integer) and an optional `domain` (else the file's name).  `domains` selects, `per_domain`
    keeps the first n of each domain.

    A prompt is keyed `domain:id`, or `domain:file/id` where the row names another domain than its file's, so that two
    files numbered from 0 stay apart.  A row without an id is `line-N`, its physical line, blank lines counted.  Ids are
    compared as text: 7 and "7" are one id; "q7", "Q7" and "q7 " are three.

    TextError, with file and line, for an id used twice and for a broken row or one without text, in every domain.  Only
    a row without an id that repeats the text of another such row of its domain is left out, with a warning.
    """
    if per_domain is not None and per_domain < 1:
        raise TextError(f"per_domain must be at least 1, not {per_domain}")
    paths = [paths] if isinstance(paths, str | Path) else paths
    rows = [row for path in paths for row in _rows(Path(path))]
    present = list(dict.fromkeys(prompt.domain for _, prompt, _ in rows))
    domains = present if domains is None else domains
    if unknown := [name for name in domains if name not in present]:
        raise TextError(f"no prompts of domain {', '.join(map(repr, unknown))}; the files hold {', '.join(present)}")
    if not domains:
        raise TextError("no prompts: give at least one file and one domain")

    lines_by_id: dict[str, str] = {}
    for where, prompt, _ in rows:
        if (first := lines_by_id.setdefault(prompt.id, where)) is not where:
            raise TextError(f"prompt id {prompt.id!r} is used twice: {first} and {where}")

    prompts: list[Prompt] = []
    taken: Counter[str] = Counter()
    lines_by_text: dict[tuple[str, str], str] = {}
    for where, prompt, has_id in rows:
        domain = prompt.domain
        if domain not in domains or taken[domain] == per_domain:
            continue
        if not has_id and (first := lines_by_text.setdefault((domain, prompt.text), where)) is not where:
            warnings.warn(f"{where} repeats the text of {first} and is left out", stacklevel=2)
            continue
        taken[domain] += 1
        prompts.append(prompt)
    return prompts


def _rows(path: Path) -> Iterator[tuple[str, Prompt, bool]]:
    """Each row of a file: where it stands, its prompt, whether it brought its own id."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TextError(f"{path}: cannot be read ({error.strerror})") from error
    if data.startswith(b"\x1f\x8b"):
        raise TextError(f"{path}: is compressed with gzip; decompress it first")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data:
        raise TextError(f"{path}: is UTF-16 or binary (byte order mark or NUL bytes); save it as UTF-8")
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not any(line.strip() for line in lines):
        raise TextError(f"{path}: is empty")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            identity, domain, text = _fields(line)
        except (ValueError, RecursionError) as error:
            raise TextError(f"{where}: {error}") from error
        domain = path.stem if domain is None else domain
        prefix = f"{domain}:" if domain == path.stem else f"{domain}:{path.stem}/"
        key = f"line-{number}" if identity is None else identity
        yield where, Prompt(prefix + key, domain, text), identity is not None


def _fields(line: bytes) -> tuple[str | None, str | None, str]:
    """The (id, domain, text) of one line; ValueError with the reason when it has no usable text."""
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise ValueError(f"broken JSON, {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise ValueError(f"not a JSON object but {type(row).__name__}")
    identity, domain = row.get("id"), row.get("domain")
    if identity == "" or isinstance(identity, bool) or not isinstance(identity, str | int | None):
        raise ValueError(f"id must be a string or an integer, not {identity!r}")
    if domain == "" or not isinstance(domain, str | None):
        raise ValueError(f"domain must be a string, not {domain!r}")
    field = next((name for name in ("turns", "prompt", "question") if row.get(name) is not None), None)
    if field is None:
        raise ValueError("no text: the row has none of turns, prompt, question")
    text = row[field]
    if field == "turns":
        text = text[0] if isinstance(text, list) and text else None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"no text: {field} is empty or not {'a list of strings' if field == 'turns' else 'a string'}")
    text.encode("utf-8")  # a lone surrogate escape is valid JSON, but no text
    return None if identity is None else str(identity), domain, text


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return row


@dataclass(frozen=True, eq=False)
class Text:
    """The text side of a model folder, made by `Text.from_folder`.

    `vocab_size` is one more than the tokenizer's largest id, added tokens included; a model may pad beyond it.
    `special_ids` are the added tokens flagged special and the named ones (bos, eos, pad, ...).  `stop_source` is
    "user", "generation_config.json", "config.json", "tokenizer" or "none"; `template_source` is "chat_template.jinja",
    "tokenizer_config.json" or "none".
    """

    folder: Path
    tokenizer: Any
    vocab_size: int
    special_ids: frozenset[int]
    special_tokens: Mapping[str, str]
    stop_ids: tuple[int, ...]
    stop_source: str
    template: str | None
    template_source: str

    @classmethod
    def from_folder(cls, folder: Path, *, stop_ids: Sequence[int] | None = None) -> "Text":
        """Read `tokenizer.json` and the settings beside it.

        The stop ids are all ids of the first source that names any: the argument, `generation_config.json`,
        `config.json`, the tokenizer's `eos_token`.  With none at all, answers run to their length limit.
        """
        from tokenizers import Tokenizer

        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TextError(f"{folder} has no tokenizer.json; a tokenizer.model or vocab.json alone is not supported")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare exceptions
            raise TextError(f"{path}: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        known = set(tokenizer.get_vocab(with_added_tokens=True).values())

        settings = _settings(folder, "tokenizer_config.json")
        named, others = _special_tokens(_settings(folder, "special_tokens_map.json"), settings)
        special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        special |= known & {tokenizer.token_to_id(token) for token in [*named.values(), *others]}
        sources = {
            "user": stop_ids,
            "generation_config.json": _settings(folder, "generation_config.json").get("eos_token_id"),
            "config.json": _settings(folder, "config.json").get("eos_token_id"),
            "tokenizer": [tokenizer.token_to_id(named["eos_token"])] if "eos_token" in named else None,
        }
        stops, stop_source = _stops(sources, known)
        template, template_source = _template(folder, settings)
        return cls(
            folder=folder,
            tokenizer=tokenizer,
            vocab_size=max(known, default=-1) + 1,
            special_ids=frozenset(special),
            special_tokens=named,
            stop_ids=stops,
            stop_source=stop_source,
            template=template,
            template_source=template_source,
        )

    @property
    def template_hash(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the template's text; empty without a template."""
        return "" if self.template is None else hashlib.sha256(self.template.encode()).hexdigest()[:16]

    @property
    def template_knows_thinking(self) -> bool:
        """Whether the template reads `enable_thinking`; where it does not, `thinking` makes no difference."""
        if self.template is None:
            return False
        syntax = self._compiled.environment.parse(self.template)
        from jinja2 import nodes  # after _compiled, which says what to do where it is missing

        return any(name.name == "enable_thinking" for name in syntax.find_all(nodes.Name))

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands: no token is added, special tokens written out in it are recognised."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids, special tokens included; padding ids beyond the vocabulary have no text."""
        return self.tokenizer.decode([int(id) for id in ids], skip_special_tokens=False)

    def chat(self, messages: Sequence[Mapping[str, str]], *, thinking: bool | None = None) -> list[int]:
        """Prompt ids of a conversation: `render`, then `encode`, so no token is put before the template's own."""
        return self.encode(self.render(messages, thinking=thinking))

    def render(self, messages: Sequence[Mapping[str, str]], *, thinking: bool | None = None) -> str:
        """A conversation as the text that asks for the assistant's next turn.

        `thinking` reaches the template as `enable_thinking`; None leaves that unset, so the template's default holds.
        TextError where the folder has no template, and where the template fails or tries what the sandbox forbids.
        """
        if self.template is None:
            raise TextError(
                f"{self.folder} has no chat template: neither chat_template.jinja nor a default chat_template in "
                "tokenizer_config.json; put the model's own template there, or use plain prompts"
            )
        if not isinstance(thinking, bool | None):
            raise TextError(f"thinking must be True, False or None, not {thinking!r}")
        messages = [dict(message) for message in messages]
        if not messages or any(not isinstance(turn.get(key), str) for turn in messages for key in ("role", "content")):
            raise TextError("messages must be a list of at least one {'role': text, 'content': text}")
        variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        if thinking is not None:
            variables["enable_thinking"] = thinking
        template = self._compiled
        try:
            return template.render(**self.special_tokens, **variables, range=_budgeted_range(RANGE_BUDGET))
        except Exception as error:
            raise TextError(f"the chat template in {self.folder} failed: {type(error).__name__}: {error}") from error

    @cached_property
    def _compiled(self) -> Any:
        environment = _sandbox()
        try:
            return environment.from_string(self.template)
        except Exception as error:
            raise TextError(f"{self.folder}, {self.template_source}: broken chat template: {error}") from error


def strip_stop(ids: Sequence[int], stop_ids: Collection[int]) -> tuple[list[int], bool]:
    """The ids before the first stop id, and whether there was one."""
    ids = [int(id) for id in ids]
    end = next((index for index, id in enumerate(ids) if id in stop_ids), len(ids))
    return ids[:end], end < len(ids)


def _settings(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_bytes())
    except ValueError as error:
        raise TextError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(settings, dict):
        raise TextError(f"{path}: must hold a JSON object")
    return settings


def _special_tokens(*sources: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Special tokens by name (`eos_token` and the like; later sources win), and those without a name of their own."""

    def content(value: Any) -> str | None:
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) and value else None

    named: dict[str, str] = {}
    others: list[str] = []
    for source in sources:
        named |= {key: token for key, value in source.items() if key.endswith("_token") and (token := content(value))}
        for key in ("additional_special_tokens", "extra_special_tokens"):
            group = source.get(key) or []
            values = group.values() if isinstance(group, dict) else group
            others += [token for value in values if (token := content(value))]
    return named, others


def _stops(sources: Mapping[str, Any], known: Collection[int]) -> tuple[tuple[int, ...], str]:
    for source, value in sources.items():
        ids = [] if value is None else list(value) if isinstance(value, Collection) else [value]
        for id in ids:
            if isinstance(id, bool) or not isinstance(id, Integral) or id not in known:
                raise TextError(f"stop id {id!r} (from: {source}) is not an id of the tokenizer's vocabulary")
        if ids:
            return tuple(dict.fromkeys(int(id) for id in ids)), source
    return (), "none"


def _template(folder: Path, settings: Mapping[str, Any]) -> tuple[str | None, str]:
    path = folder / "chat_template.jinja"
    if path.is_file():
        text = path.read_text("utf-8")
        if not text.strip():
            raise TextError(f"{path}: is empty")
        return text, path.name
    template: Any = settings.get("chat_template") or None
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if not isinstance(template, str | None):
        raise TextError(f"{folder}: chat_template in tokenizer_config.json must be text or a list of named templates")
    return template, "none" if template is None else "tokenizer_config.json"


def _sandbox() -> Any:
    """The environment chat templates are written for; one that calls `strftime_now` renders differently each day."""
    advice = "chat templates need jinja2 3.1.6 or later (older sandboxes leak): pip install jinja2"
    try:
        from jinja2 import ext, nodes, sandbox
        from jinja2.exceptions import TemplateError
    except ImportError as error:
        raise TextError(advice) from error
    if [int(part) for part in re.findall(r"\d+", version("jinja2"))[:3]] < [3, 1, 6]:
        raise TextError(f"{advice}; this is {version('jinja2')}")

    class Generation(ext.Extension):
        """`{% generation %} ... {% endgeneration %}` marks the assistant's words for training; the text is the same."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _budgeted_range(budget: int) -> Callable[..., range]:
    """A `range` that stops a template whose loops, nested ones included, count further than `budget` in all."""

    def counted(*bounds: int) -> range:
        nonlocal budget
        numbers = range(*bounds)
        budget -= len(numbers)
        if budget < 0:
            raise OverflowError("its loops are too long")
        return numbers

    return counted
