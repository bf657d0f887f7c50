"""Prompts files, tokenizers, chat templates, stop ids: faults people met in public, and agreement with transformers."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import MappingProxyType

import pytest

from models.text import Prompt, Text, TextError, builtin_prompts, read_prompts, strip_stop

ROOT = Path(__file__).parents[1]
END, START, STOP, BOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"
USER = [{"role": "user", "content": "hello there"}]
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


@pytest.fixture(scope="module")
def tokenizer_json():
    """A small byte-level tokenizer that adds a first token when asked, and truncates and pads unless told not to."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[END, START, STOP, BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello there", "user assistant system", "think it through"], trainer)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=64)
    return tokenizer.to_str()


@pytest.fixture
def folder(tmp_path, tokenizer_json):
    """Makes a model folder: one file per keyword (`jinja`, or the stem of a JSON file)."""

    def make(jinja=None, **files):
        (tmp_path / "tokenizer.json").write_text(files.pop("tokenizer", tokenizer_json), "utf-8")
        if jinja is not None:
            (tmp_path / "chat_template.jinja").write_text(jinja, "utf-8")
        for stem, value in files.items():
            (tmp_path / f"{stem}.json").write_text(json.dumps(value), "utf-8")
        return tmp_path

    return make


@pytest.fixture
def qwen_ids():
    """A tokenizer with four ids of the size real ones have, and gaps between them."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    vocab = {"stop": 17, "go": 55, "now": 90, END: 151643, START: 151644, STOP: 151645}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="go"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (END, START, STOP)])
    return tokenizer.to_str()


@pytest.fixture
def prompts_file(tmp_path):
    """Writes rows (dicts, or lines as they are) as a prompts file."""

    def write(*rows, name="p.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        lines = [json.dumps(row) if isinstance(row, dict) else row for row in rows]
        path.write_bytes("\n".join(lines).encode())
        return path

    return write


# Chat template and thinking mode (G1)


def test_thinking_on_and_unset_end_with_the_header_and_off_adds_an_empty_block(folder):
    text = Text.from_folder(folder(jinja=TEMPLATE))
    header = f"{START}user\nhello there{STOP}\n{START}assistant\n"
    assert text.render(USER) == text.render(USER, thinking=True) == header
    assert text.render(USER, thinking=False) == header + "<think>\n\n</think>\n\n"
    assert text.template_knows_thinking


def test_unset_is_not_the_same_as_either_flag(folder):
    text = Text.from_folder(folder(jinja="{{ enable_thinking is defined }} {{ enable_thinking }}"))
    assert [text.render(USER, thinking=flag) for flag in (None, True, False)] == ["False ", "True True", "True False"]
    with pytest.raises(TextError, match="thinking must be"):
        text.render(USER, thinking="off")


def test_chat_adds_no_first_token_and_neither_truncates_nor_pads(folder, qwen_ids):
    text = Text.from_folder(folder(jinja=TEMPLATE))
    ids = text.chat(USER)
    assert ids == text.encode(text.render(USER)) and len(ids) > 4
    assert ids[0] == text.tokenizer.token_to_id(START)
    assert text.decode(ids) == text.render(USER)
    assert Text.from_folder(folder(jinja=TEMPLATE, tokenizer=qwen_ids)).chat(USER)[0] == 151644


def test_jinja_file_wins_over_the_tokenizer_config(folder):
    both = folder(jinja="from file", tokenizer_config={"chat_template": "from config"})
    text = Text.from_folder(both)
    assert (text.render(USER), text.template_source) == ("from file", "chat_template.jinja")
    assert text.template_hash == hashlib.sha256(b"from file").hexdigest()[:16]
    (both / "chat_template.jinja").unlink()
    text = Text.from_folder(both)
    assert (text.render(USER), text.template_source) == ("from config", "tokenizer_config.json")
    assert text.template_hash == hashlib.sha256(b"from config").hexdigest()[:16]


def test_a_list_of_templates_yields_its_default(folder):
    tools, default = {"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}
    assert Text.from_folder(folder(tokenizer_config={"chat_template": [tools, default]})).render(USER) == "plain"
    assert Text.from_folder(folder(tokenizer_config={"chat_template": [tools]})).template_source == "none"


@pytest.mark.parametrize("config", [{}, {"chat_template": None}, {"chat_template": ""}, {"chat_template": []}])
def test_without_a_template_chat_is_refused_and_plain_text_works(folder, config):
    text = Text.from_folder(folder(tokenizer_config=config))
    assert (text.template, text.template_source, text.template_hash) == (None, "none", "")
    assert not text.template_knows_thinking
    assert text.decode(text.encode("hello there")) == "hello there"
    with pytest.raises(TextError, match=r"no chat template: neither chat_template.jinja nor"):
        text.chat(USER)


def test_an_empty_or_misshapen_template_is_refused(folder):
    with pytest.raises(TextError, match=r"chat_template.jinja: is empty"):
        Text.from_folder(folder(jinja="\n"))
    (folder() / "chat_template.jinja").unlink()
    with pytest.raises(TextError, match="must be text or a list"):
        Text.from_folder(folder(tokenizer_config={"chat_template": {"default": "x"}}))


@pytest.mark.parametrize(
    "template, knows",
    [
        ("{{ enable_thinking }}", True),
        ("{% set enable_thinking = enable_thinking | default(true) %}{{ 1 }}", True),
        ("{# enable_thinking #}enable_thinking {{ 'enable_thinking' }}", False),
    ],
)
def test_template_knows_thinking(folder, template, knows):
    text = Text.from_folder(folder(jinja=template))
    assert text.template_knows_thinking is knows
    assert knows or text.render(USER, thinking=True) == text.render(USER, thinking=False) == text.render(USER)


def test_special_tokens_tools_and_documents_are_what_transformers_passes(folder):
    template = "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ tools is none and documents is none }}"
    config = {"bos_token": BOS, "eos_token": {"content": STOP, "__type": "AddedToken"}, "pad_token": None}
    text = Text.from_folder(folder(jinja=template, tokenizer_config=config, special_tokens_map={"eos_token": END}))
    assert text.render(USER) == f"{BOS}{STOP}FalseTrue"


def test_blocks_are_trimmed_loops_can_break_and_json_is_not_escaped(folder):
    template = "  {% for m in messages %}\n{{ m | tojson }}\n    {% break %}\n  {% endfor %}\nend"
    text = Text.from_folder(folder(jinja=template))
    message = {"role": "user", "content": "<b> & 'é'"}
    assert text.render([MappingProxyType(message), *USER]) == json.dumps(message, ensure_ascii=False) + "\nend"


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"role": "user", "content": None}], [{"content": "hi"}]])
def test_misshapen_messages_are_refused(folder, messages):
    with pytest.raises(TextError, match="messages must be"):
        Text.from_folder(folder(jinja=TEMPLATE)).render(messages)


# The sandbox


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ raise_exception.__globals__['os'].system('true') }}", "SecurityError"),
        ("{{ ('{0.__class__.__mro__}' | attr('format'))(1).x() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0].update(role='system') }}", "SecurityError"),
        ("{% for i in range(10 ** 12) %}{% endfor %}", "OverflowError"),
        ("{% for i in range(2000) %}{% for j in range(2000) %}{% endfor %}{% endfor %}", "OverflowError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
        ("{% include 'other.jinja' %}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ raise_exception('only users may speak') }}", "TemplateError: only users may speak"),
    ],
)
def test_a_template_that_attacks_loops_or_fails_is_a_named_error(folder, template, reason):
    text = Text.from_folder(folder(jinja=template))
    with pytest.raises(TextError, match=reason):
        text.render(USER)


def test_format_strings_reach_no_attributes(folder):
    text = Text.from_folder(folder(jinja="{{ '{0.__class__}'.format(messages) }}"))
    assert "list" not in text.render(USER)


def test_the_callers_messages_stay_as_they_are(folder):
    messages = [dict(turn) for turn in USER]
    Text.from_folder(folder(jinja="{% set messages = messages[1:] %}{{ messages | length }}")).render(messages)
    assert messages == USER


def test_a_broken_template_is_a_named_error(folder):
    with pytest.raises(TextError, match="broken chat template"):
        Text.from_folder(folder(jinja="{% if %}")).render(USER)


def test_missing_or_old_jinja_says_what_to_install(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("models.text.version", lambda package: "3.1.5")
        with pytest.raises(TextError, match="pip install jinja2"):
            Text.from_folder(folder(jinja=TEMPLATE)).render(USER)
    text = Text.from_folder(folder(jinja=TEMPLATE))
    monkeypatch.setitem(sys.modules, "jinja2", None)
    for use in (lambda: text.render(USER), lambda: text.template_knows_thinking):
        with pytest.raises(TextError, match="pip install jinja2"):
            use()


# Stop ids (G2)


def stops(folder, qwen_ids, user=None, **files):
    text = Text.from_folder(folder(tokenizer=qwen_ids, **files), stop_ids=user)
    return text.stop_ids, text.stop_source


def test_every_stop_id_of_the_generation_config_is_honoured(folder, qwen_ids):
    files = {"config": {"eos_token_id": 151645}, "generation_config": {"eos_token_id": [151645, 151643]}}
    ids, source = stops(folder, qwen_ids, **files)
    assert (ids, source) == ((151645, 151643), "generation_config.json")
    assert strip_stop([90, 17, 151643, 55, 151645], ids) == ([90, 17], True)


@pytest.mark.parametrize(
    "user, generation, config, tokenizer, expected",
    [
        (None, 151643, 151645, None, ((151643,), "generation_config.json")),
        (None, [151645, 151643, 151645], None, None, ((151645, 151643), "generation_config.json")),
        (None, None, 151645, END, ((151645,), "config.json")),
        (None, [], [151645], END, ((151645,), "config.json")),
        (None, None, None, STOP, ((151645,), "tokenizer")),
        (None, None, [], {"content": END}, ((151643,), "tokenizer")),
        (None, None, None, None, ((), "none")),
        ([17, 55, 17], 151643, 151645, STOP, ((17, 55), "user")),
        ([], 151643, None, STOP, ((151643,), "generation_config.json")),
    ],
)
def test_stop_ids_come_from_the_first_source_that_names_any(
    folder, qwen_ids, user, generation, config, tokenizer, expected
):
    files = {
        "generation_config": {"eos_token_id": generation},
        "config": {"eos_token_id": config},
        "tokenizer_config": {"eos_token": tokenizer},
    }
    assert stops(folder, qwen_ids, user, **files) == expected


def test_absent_files_and_keys_fall_through(folder, qwen_ids):
    assert stops(folder, qwen_ids) == ((), "none")
    assert stops(folder, qwen_ids, generation_config={}, special_tokens_map={"eos_token": STOP}) == (
        (151645,),
        "tokenizer",
    )
    assert stops(folder, qwen_ids, config={"eos_token_id": 17}) == ((17,), "config.json")


@pytest.mark.parametrize("value", [151646, -1, 18, [17, 999999], True, "17", 17.0, [None]])
def test_a_stop_id_outside_the_vocabulary_is_refused(folder, qwen_ids, value):
    with pytest.raises(TextError, match=r"stop id .* \(from: generation_config.json\)"):
        stops(folder, qwen_ids, generation_config={"eos_token_id": value})
    user = value if isinstance(value, list) else [value]
    with pytest.raises(TextError, match=r"stop id .* \(from: user\)"):
        stops(folder, qwen_ids, user)


@pytest.mark.parametrize("value", [True, 1.0, "1"])
def test_a_stop_id_must_be_an_integer(folder, value):
    path = folder(config={"eos_token_id": value})
    with pytest.raises(TextError, match=r"stop id .* \(from: config.json\)"):
        Text.from_folder(path)
    assert Text.from_folder(path, stop_ids=[1]).stop_ids == (1,)


def test_an_eos_token_the_tokenizer_does_not_know_is_refused(folder, qwen_ids):
    with pytest.raises(TextError, match=r"\(from: tokenizer\)"):
        stops(folder, qwen_ids, tokenizer_config={"eos_token": "</s>"})


@pytest.mark.parametrize(
    "ids, expected",
    [([], ([], False)), ([5, 6], ([5, 6], False)), ([1, 5], ([], True)), ([5, 2, 6, 1], ([5], True))],
)
def test_strip_stop_cuts_at_the_first_stop(ids, expected):
    assert strip_stop(ids, (1, 2)) == expected
    assert strip_stop(ids, ()) == (ids, False)


# Tokenizer and folder


def test_special_ids_are_the_flagged_and_the_named_ones(folder):
    config = {"additional_special_tokens": ["<think>", {"content": "absent"}], "pad_token": "!", "add_bos_token": True}
    text = Text.from_folder(folder(tokenizer_config=config))
    expected = {text.tokenizer.token_to_id(token) for token in (END, START, STOP, BOS, "<think>", "!")}
    assert text.special_ids == expected
    assert text.tokenizer.token_to_id("</think>") not in text.special_ids


def test_vocab_size_covers_the_largest_id(folder, qwen_ids):
    text = Text.from_folder(folder())
    assert text.vocab_size == text.tokenizer.get_vocab_size(with_added_tokens=True)
    assert Text.from_folder(folder(tokenizer=qwen_ids)).vocab_size == 151646


def test_special_tokens_in_a_text_are_recognised_and_decoded(folder):
    text = Text.from_folder(folder())
    ids = text.encode(f"hello{STOP}")
    assert ids[-1] == text.tokenizer.token_to_id(STOP)
    assert text.decode(ids) == f"hello{STOP}" and text.encode("") == []


def test_unusable_folders_are_named(tmp_path, folder):
    with pytest.raises(TextError, match=r"has no tokenizer.json"):
        Text.from_folder(tmp_path)
    with pytest.raises(TextError, match=r"tokenizer.json"):
        Text.from_folder(folder(tokenizer="{}"))
    with pytest.raises(TextError, match=r"tokenizer_config.json: must hold a JSON object"):
        Text.from_folder(folder(tokenizer_config=[]))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TextError, match=r"tokenizer_config.json: not valid JSON"):
        Text.from_folder(folder())


def test_importing_the_module_imports_no_heavy_library():
    names = "{'torch', 'tokenizers', 'jinja2', 'transformers'}"
    code = f"import sys, models.text; sys.exit(bool({names} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# Agreement with transformers

CONVERSATIONS = [
    USER,
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " two  spaces,\n\ttabs & <b>é日本</b> "}],
    [*USER, {"role": "assistant", "content": f"hi {STOP}"}, {"role": "user", "content": "{{ messages }}\n"}],
]
OTHER_TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {{ m.role | upper }}: {{ m['content'] | trim }}\n{% endfor %}\n",
    "{% for m in messages %}{% generation %}{% set x = loop.index %}{{ x }}{{ m.content }}\n{% endgeneration %}\n"
    "{{ x is defined }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'user' %}{% set ns.n = ns.n + 1 %}"
    "{% if ns.n > 1 %}{% continue %}{% endif %}{{ m | tojson(indent=2) }}{% endfor %}{{ ns.n }}{{ tools }}",
    "{% for i in range(messages | length) %}{{ i }}{{ messages[-1 - i].content }}{{ loop.last }}{% endfor %}\n\n",
]


@pytest.mark.parametrize("template", [TEMPLATE, *OTHER_TEMPLATES])
def test_prompt_ids_agree_with_transformers(folder, template):
    transformers = pytest.importorskip("transformers")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": STOP, "pad_token": END}
    path = folder(tokenizer_config={**config, "chat_template": template})
    assert_same_as_transformers(Text.from_folder(path), transformers.PreTrainedTokenizerFast.from_pretrained(path))


def test_prompt_ids_of_a_real_model_agree_with_transformers():
    if not (path := os.environ.get("BLOCKFLOOR_SMOLLM2")):
        pytest.skip("BLOCKFLOOR_SMOLLM2 names no folder of SmolLM2-135M-Instruct")
    transformers = pytest.importorskip("transformers")
    text = Text.from_folder(Path(path))
    assert text.stop_ids == (2,) and text.vocab_size == 49152
    peer = transformers.AutoTokenizer.from_pretrained(path)
    assert set(peer.all_special_ids) <= text.special_ids
    assert_same_as_transformers(text, peer)


def assert_same_as_transformers(text, peer):
    for messages in CONVERSATIONS:
        for thinking in (None, True, False):
            flags = {} if thinking is None else {"enable_thinking": thinking}
            rendered = peer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **flags)
            ids = peer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **flags)["input_ids"]
            assert text.render(messages, thinking=thinking) == rendered
            assert text.chat(messages, thinking=thinking) == ids
            assert text.decode(ids) == peer.decode(ids)


# Prompts files: bytes and lines (J1)


def test_bom_crlf_blank_lines_and_a_missing_newline_lose_nothing(tmp_path):
    path = tmp_path / "p.jsonl"
    a, b, c = (json.dumps({"prompt": letter}).encode() for letter in "abc")
    path.write_bytes(b"\xef\xbb\xbf" + a + b"\r\n\r\n" + b + b"\r\n   \r\n" + c)
    assert [(prompt.text, prompt.id) for prompt in read_prompts([path])] == [
        ("a", "p:line-1"),
        ("b", "p:line-3"),
        ("c", "p:line-5"),
    ]
    path.write_bytes(b"\xef\xbb\xbf" + a)
    assert read_prompts([path]) == [Prompt("p:line-1", "p", "a")]


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf\r\n  \n", "is empty"),
        (json.dumps({"prompt": "a"}).encode("utf-16"), "UTF-16"),
        (json.dumps({"prompt": "a"}).encode("utf-16-be"), "UTF-16"),
        (gzip.compress(b'{"prompt": "a"}'), "gzip"),
        (b'{"prompt": "a"}\n\n["b"]\n', "line 3: not a JSON object but list"),
        (b'{"prompt": "a"}\n"b"', "line 2: not a JSON object but str"),
        (b'{"prompt": "a"}\n{"prompt": "b"\n{"prompt": "c"}', "line 2: broken JSON"),
        (b'{"prompt": "a"}\n\n\xef\xbb\xbf{"prompt": "b"}', "line 3: broken JSON"),
        (b'{"prompt": "a"}\r{"prompt": "b"}', "line 1: broken JSON"),
        (b'\n{"prompt": "\xff"}', "line 2: 'utf-8' codec"),
        (b'{"prompt": "\\ud800"}', "line 1: 'utf-8' codec"),
        (b"[" * 100_000, "line 1: "),
        (b'{"prompt": "a", "prompt": "b"}', "line 1: a key occurs twice"),
    ],
)
def test_unreadable_files_and_lines_are_refused_with_the_reason(tmp_path, data, reason):
    path = tmp_path / "p.jsonl"
    path.write_bytes(data)
    with pytest.raises(TextError, match=f"p.jsonl.*{reason}"):
        read_prompts([path])


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"id": 1},
        {"prompt": ""},
        {"prompt": " \n"},
        {"prompt": None},
        {"prompt": 7},
        {"prompt": ["a"]},
        {"turns": []},
        {"turns": "a"},
        {"turns": [""]},
        {"turns": [None, "b"]},
        {"turns": [{"content": "a"}]},
        {"turns": [], "prompt": "a"},
    ],
)
def test_a_row_without_text_is_refused_with_its_line(prompts_file, row):
    with pytest.raises(TextError, match="line 3: no text"):
        read_prompts([prompts_file({"prompt": "a"}, "", row)])


@pytest.mark.parametrize("extra", [{"id": ""}, {"id": True}, {"id": 1.0}, {"id": ["a"]}, {"domain": ""}, {"domain": 3}])
def test_a_misshapen_id_or_domain_is_refused_with_its_line(prompts_file, extra):
    with pytest.raises(TextError, match=r"line 2: (id|domain) must be"):
        read_prompts([prompts_file({"prompt": "a"}, {"prompt": "b", **extra})])


def test_the_three_kinds_of_row_and_line_separators_inside_a_text(prompts_file):
    rows = [{"turns": ["a", "later"]}, {"question": "b"}, {"prompt": "c", "turns": None}]
    path = prompts_file(*rows, '{"prompt": "d\u2028e\u0085f"}')
    assert [prompt.text for prompt in read_prompts([path])] == ["a", "b", "c", "d\u2028e\u0085f"]
    assert read_prompts([path]) == read_prompts(str(path)) == read_prompts(path)


def test_a_missing_file_or_an_empty_request_is_refused(tmp_path, prompts_file):
    with pytest.raises(TextError, match=r"none.jsonl: cannot be read"):
        read_prompts([tmp_path / "none.jsonl"])
    with pytest.raises(TextError, match="cannot be read"):
        read_prompts([tmp_path])
    path = prompts_file({"prompt": "a"})
    for paths, options in [([], {}), ([path], {"domains": []}), ([path], {"per_domain": 0})]:
        with pytest.raises(TextError, match="at least"):
            read_prompts(paths, **options)


# Prompts files: ids (J2)


def test_two_prompts_with_one_id_are_refused_with_both_lines(prompts_file):
    path = prompts_file({"id": "q7", "prompt": "a"}, "", {"id": "q7", "prompt": "b"})
    with pytest.raises(TextError, match=r"'p:q7' is used twice: .*p.jsonl, line 1 and .*p.jsonl, line 3"):
        read_prompts([path])


def test_a_number_and_its_text_are_one_id(prompts_file):
    with pytest.raises(TextError, match=r"'p:7' is used twice.*line 1 and .*line 2"):
        read_prompts([prompts_file({"id": 7, "prompt": "a"}, {"id": "7", "prompt": "b"})])


def test_exact_duplicates_with_an_id_are_refused_and_without_one_are_left_out_with_a_warning(prompts_file):
    row = {"id": "a", "prompt": "same"}
    with pytest.raises(TextError, match=r"line 1 and .*line 2"):
        read_prompts([prompts_file(row, row)])
    path = prompts_file({"prompt": "same"}, {"prompt": "other"}, {"prompt": "same"})
    with pytest.warns(UserWarning, match="p.jsonl, line 3 repeats the text of .*p.jsonl, line 1") as caught:
        prompts = read_prompts([path])
    assert [prompt.id for prompt in prompts] == ["p:line-1", "p:line-2"]
    assert len(caught) == 1 and caught[0].filename == __file__


def test_equal_texts_stay_where_ids_or_domains_tell_them_apart(prompts_file):
    rows = [{"id": 1}, {"id": 2}, {}, {"domain": "d"}]
    prompts = read_prompts([prompts_file(*({**row, "prompt": "same"} for row in rows))])
    assert [prompt.id for prompt in prompts] == ["p:1", "p:2", "p:line-3", "d:p/line-4"]


def test_made_ids_stay_when_blank_lines_are_added_at_the_end(prompts_file):
    rows = [{"prompt": "a"}, {"id": "x", "prompt": "b"}, "", {"prompt": "c"}]
    before = read_prompts([prompts_file(*rows)])
    assert [prompt.id for prompt in before] == ["p:line-1", "p:x", "p:line-4"]
    assert read_prompts([prompts_file(*rows, "", "  ", "")]) == before


def test_a_made_id_never_shares_the_key_of_a_given_one(prompts_file):
    with pytest.raises(TextError, match="'p:line-2' is used twice"):
        read_prompts([prompts_file({"id": "line-2", "prompt": "a"}, {"prompt": "b"})])


def test_two_files_numbered_from_zero_do_not_collide(prompts_file):
    rows = [{"id": 0, "prompt": "a"}, {"id": 1, "prompt": "b"}]
    paths = [prompts_file(*rows, name=name) for name in ("x.jsonl", "y.jsonl")]
    assert [prompt.id for prompt in read_prompts(paths)] == ["x:0", "x:1", "y:0", "y:1"]
    shared = [{"domain": "x", **row} for row in rows]
    paths = [prompts_file(*shared, name=name) for name in ("x.jsonl", "y.jsonl")]
    prompts = read_prompts(paths)
    assert [prompt.id for prompt in prompts] == ["x:0", "x:1", "x:y/0", "x:y/1"]
    assert {prompt.domain for prompt in prompts} == {"x"}
    assert [prompt.id for prompt in read_prompts(paths[1:])] == ["x:y/0", "x:y/1"], "a key depends on its own file only"


def test_the_same_file_twice_or_two_of_one_name_are_refused_where_keys_meet(prompts_file):
    one, other = (prompts_file({"prompt": text}, name=f"{text}/p.jsonl") for text in "ab")
    for paths in ([one, one], [one, other]):
        with pytest.raises(TextError, match="'p:line-1' is used twice"):
            read_prompts(paths)


def test_ids_that_differ_in_case_or_a_trailing_space_are_kept_apart(prompts_file):
    prompts = read_prompts([prompts_file(*({"id": id, "prompt": "a"} for id in ("q7", "Q7", "q7 ")))])
    assert [prompt.id for prompt in prompts] == ["p:q7", "p:Q7", "p:q7 "]


# Selection, and the files at hand


def test_domains_select_and_per_domain_keeps_the_first_in_file_order(prompts_file):
    rows = [{"id": i, "domain": domain, "prompt": f"{domain}{i}"} for i, domain in enumerate("abcabcab")]
    path = prompts_file(*rows)
    assert [prompt.text for prompt in read_prompts([path], per_domain=2)] == ["a0", "b1", "c2", "a3", "b4", "c5"]
    chosen = read_prompts([path], domains=["c", "a"], per_domain=2)
    assert [prompt.text for prompt in chosen] == ["a0", "c2", "a3", "c5"]
    assert len(read_prompts([path])) == len(rows)
    with pytest.raises(TextError, match="no prompts of domain 'd', 'A'; the files hold a, b, c"):
        read_prompts([path], domains=["d", "a", "A"])


def test_per_domain_counts_distinct_texts_and_reads_on_in_peace(prompts_file):
    path = prompts_file(*({"prompt": text} for text in "aabcb"))
    with pytest.warns(UserWarning, match="line 2 repeats") as caught:
        assert [prompt.text for prompt in read_prompts([path], per_domain=2)] == ["a", "b"]
    assert len(caught) == 1


def test_an_unselected_domain_is_still_checked(prompts_file):
    twice = {"id": 1, "domain": "b", "prompt": "x"}
    rows = [{"domain": "a", "prompt": "x"}, twice, {**twice, "prompt": "y"}]
    with pytest.raises(TextError, match="'b:p/1' is used twice"):
        read_prompts([prompts_file(*rows)], domains=["a"])


def test_builtin_prompts_are_four_times_24_distinct_texts():
    prompts = read_prompts(builtin_prompts())
    domains = [prompt.domain for prompt in prompts]
    assert list(dict.fromkeys(domains)) == ["arithmetic", "code", "instructions", "chat"]
    assert {domains.count(domain) for domain in domains} == {24} and len(prompts) == 96
    assert len({prompt.id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == 96
    assert prompts[0].id == "arithmetic:arithmetic-01"
    assert all(60 <= len(prompt.text.split()) <= 150 for prompt in prompts if prompt.domain == "chat")


def test_public_prompts_files_are_read_whole():
    shared = ROOT.parent / "shared" / "data" / "prompts"
    if not shared.is_dir():
        pytest.skip("no public prompts files beside the project")
    for path in sorted(shared.glob("*.jsonl")):
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert len(read_prompts([path])) + len(caught) == len(lines), path.name
