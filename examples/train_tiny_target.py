"""Train the tiny target: a Qwen3 decoder of 2.8 million parameters, in the hub's layout, on a CPU.

Its corpus is text that every Python installation holds (`models/corpus.py`), its tokenizer a byte-level BPE of
2,048 tokens, its chat format ChatML.  It is a small language model to measure and to train drafters for, in minutes
and without a download; it knows little and says it confidently.

    python examples/train_tiny_target.py --out tiny/target                # 100 minutes on two cores
    python examples/train_tiny_target.py --out tiny/target --resume       # go on after an interruption
    python examples/train_tiny_target.py --out /tmp/smoke --limit 8 --steps 4    # seconds: a trial of every step

Writes the model's folder every few minutes and at the end, with a model card, and the training state beside it
(`OUT.checkpoint`).  The batch of a step is a function of (seed, step), and so with `--steps` are the weights; with
`--minutes` the learning rate follows the clock, which the checkpoint stores.  The last line is one JSON document.
"""

import argparse
import hashlib
import json
import math
import platform
import sys
import time
from collections import Counter
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from tqdm import tqdm

from fast.decoder import Decoder
from fast.devices import hardware
from fast.training import write_atomically
from models import corpus
from models.config import DecoderConfig

CONTEXT = 1024
WORDS = 2048
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]  # the last is reserved for drafters
END, STOP = WORDS, WORDS + 2  # ids of <|endoftext|> and <|im_end|>
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": WORDS + len(SPECIAL),
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": [STOP, END],
    "dtype": "bfloat16",
}
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BATCH = 1024  # tokens of one step
LEARNING_RATE, WARM_UP, LEAST = 2e-3, 0.02, 0.03
LONG_FROM = 0.85  # the share of training after which rows have 1,024 tokens instead of 512


def main(arguments=None):
    """Train, or say in one line what is wrong."""
    options = parse(arguments)
    try:
        print(json.dumps(run(options)))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


def run(options):
    """Corpus, tokenizer, training, model folder; returns what the card reports."""
    if options.steps is None and options.minutes <= 0:
        raise ValueError(f"--minutes must be positive, got {options.minutes}")
    if options.steps is not None and options.steps < 1:
        raise ValueError(f"--steps must be at least 1, got {options.steps}")
    if options.limit is not None and options.limit < 4:
        raise ValueError(f"--limit must be at least 4, so that there is something to train on, got {options.limit}")
    folder, state = Path(options.out), Path(f"{options.out}.checkpoint")
    if state.exists() and not options.resume:
        raise ValueError(f"{state} exists; add --resume to go on, or choose another --out")
    if options.resume and not state.exists():
        raise ValueError(f"--resume needs {state}, which does not exist; leave --resume out to begin")
    folder.mkdir(parents=True, exist_ok=True)
    documents = corpus.build(options.seed, options.limit)
    digest = hashlib.sha256("\0".join(map(text_of, documents)).encode()).hexdigest()[:16]
    training = [d for d in documents if not d.held_out]
    if not options.resume:
        write(folder / "tokenizer.json", train_tokenizer(training).to_str().encode())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    held_out = held_out_rows(tokenizer, documents)
    trainer = Trainer(options, encode(tokenizer, training), digest)
    if options.resume:
        trainer.restore(state)

    def save(final=False):
        scores = {name: bits_per_byte(trainer.model, *rows, 200 if final else 15) for name, rows in held_out.items()}
        report = trainer.report(documents) | {"held_out_bits_per_byte": scores}
        export(trainer.model, folder, card(report, options, final))
        trainer.save(state)
        tqdm.write(json.dumps(report), file=sys.stderr)
        return report

    trainer.train(save)
    return save(final=True)


# Text and tokens


def text_of(document):
    """One exchange in ChatML, as the template writes it, the answer ended by its stop token."""
    return (
        f"<|im_start|>user\n{document.question.strip()}<|im_end|>\n"
        f"<|im_start|>assistant\n{document.answer.strip()}<|im_end|>\n"
    )


def train_tokenizer(documents):
    """Byte-level BPE: 2,048 tokens, every digit its own, then the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(
        Regex(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(
        (part for d in documents for part in text_of(d).replace("<|im_end|>", "").split("<|im_start|>")), trainer
    )
    if (size := tokenizer.get_vocab_size()) < WORDS:
        raise ValueError(f"the corpus gives {size} of {WORDS} tokens; raise --limit")
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def encode(tokenizer, documents):
    """Token ids of each document, a list of int64 arrays."""
    encoded = tokenizer.encode_batch_fast(list(map(text_of, documents)), add_special_tokens=False)
    return [np.array(e.ids) for e in encoded]


def held_out_rows(tokenizer, documents):
    """By domain: (ids of each held-out document, length of its question's part, bytes of its answer)."""
    rows = {}
    for domain in corpus.DOMAINS:
        chosen = [d for d in documents if d.held_out and d.domain == domain]
        ids = [row[: CONTEXT + 1] for row in encode(tokenizer, chosen)]
        starts = [int(np.flatnonzero(row == STOP)[0]) + 5 for row in ids]  # stop, newline, start, assistant, newline
        rows[domain] = (ids, starts, [len(d.answer.strip().encode()) for d in chosen])
    return rows


# Training


class Trainer:
    """A decoder, its optimizer, and the stream of batches; everything that a resumed run needs."""

    def __init__(self, options, documents, digest):
        self.options, self.documents = options, documents
        self.config = DecoderConfig.from_dict(CONFIG)
        self.model = Decoder(self.config, initial_weights(self.config, options.seed)).requires_grad_(True)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), foreach=True)
        self.identity = {"seed": options.seed, "corpus": digest, "config": CONFIG, "batch": BATCH}
        self.step, self.seconds, self.loss = 0, 0.0, math.nan
        self.epoch = lru_cache(2)(self.shuffled)

    def shuffled(self, number):
        """All documents in the order of one epoch, end to end."""
        order = np.random.default_rng([self.options.seed, number]).permutation(len(self.documents))
        return np.concatenate([self.documents[i] for i in order])

    def batch(self, step, length):
        """Inputs and targets of a step, int64 [rows, length]: the next 1,024 tokens of the endless stream."""
        size = sum(map(len, self.documents))
        number, start = divmod(step * BATCH, size)
        span = self.epoch(number)[start : start + BATCH + 1]
        while len(span) < BATCH + 1:
            number += 1
            span = np.concatenate([span, self.epoch(number)])[: BATCH + 1]
        span = torch.from_numpy(span)
        return span[:-1].view(-1, length), span[1:].view(-1, length)

    def progress(self):
        """The share of the training that is done, by steps or by the clock."""
        if self.options.steps is not None:
            return self.step / self.options.steps
        return self.seconds / (60 * self.options.minutes)

    def train(self, save):
        """Step until the work is done, calling `save` every few minutes of training."""
        begin, before = time.monotonic(), self.seconds
        saved = before
        with tqdm(total=self.options.steps, initial=self.step, unit="step", disable=None, mininterval=5) as bar:
            while (progress := self.progress()) < 1:
                self.loss = self.update(progress)
                self.step += 1
                self.seconds = before + time.monotonic() - begin
                bar.update()
                bar.set_postfix(loss=f"{self.loss:.3f}", done=f"{self.progress():.1%}", refresh=False)
                if self.seconds - saved > 60 * self.options.save_minutes:
                    save()
                    self.seconds = before + time.monotonic() - begin
                    saved = self.seconds

    def update(self, progress):
        """One AdamW step at linear warm-up and cosine decay; returns the loss in nats per token."""
        falling = LEAST + (1 - LEAST) * (1 + math.cos(math.pi * progress)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (progress + 1e-3) / WARM_UP) * falling
        inputs, targets = self.batch(self.step, CONTEXT if progress > LONG_FROM else CONTEXT // 2)
        loss = F.cross_entropy(forward(self.model, inputs), targets.flatten())
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss.item()} at step {self.step}; resume with a smaller learning rate")
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def save(self, path):
        """Write the whole training state, or leave the one before it untouched."""
        numbers = {"step": self.step, "seconds": self.seconds, "loss": self.loss, "identity": self.identity}
        state = numbers | {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        write_atomically(path, lambda temporary: torch.save(state, temporary))

    def restore(self, path):
        """Continue from a saved state; refused where it belongs to another run."""
        state = torch.load(path, weights_only=True)
        if differing := [key for key, value in self.identity.items() if state["identity"].get(key) != value]:
            raise ValueError(f"{path} was written with another {' and '.join(differing)}; choose another --out")
        self.step, self.seconds, self.loss = state["step"], state["seconds"], state["loss"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def report(self, documents):
        """What was done so far."""
        tokens = self.step * BATCH
        return {
            "parameters": self.config.parameter_count(),
            "documents": dict(Counter(d.domain for d in documents if not d.held_out)),
            "epoch_tokens": sum(map(len, self.documents)),
            "steps": self.step,
            "tokens": tokens,
            "minutes": round(self.seconds / 60, 2),
            "tokens_per_second": round(tokens / max(self.seconds, 1e-9)),
            "training_loss": round(self.loss, 4),
        }


def initial_weights(config, seed):
    """Normal weights of deviation fan-in^-1/2, less where they add to the residual stream; embedding 0.02."""
    torch.manual_seed(seed)
    weights = {}
    for name, shape in config.tensor_shapes().items():
        scale = 0.02 if "embed" in name else shape[-1] ** -0.5
        if "o_proj" in name or "down_proj" in name:
            scale /= (2 * config.num_layers) ** 0.5
        weights[name] = torch.ones(shape) if "norm" in name else scale * torch.randn(shape)
    return weights


def forward(model, tokens):
    """The decoder's own layers over a batch of rows [B, S], causal within each row: logits [B * S, V]."""
    rows, length = tokens.shape

    def attend(_, *qkv):
        q, k, v = (t.view(rows, length, -1, t.shape[-1]).transpose(1, 2).contiguous() for t in qkv)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(rows * length, -1)

    positions = torch.arange(length).repeat(rows)
    hidden, _ = model.forward(tokens.flatten(), positions, attend)
    return model.read_out(hidden)


@torch.no_grad()
def bits_per_byte(model, ids, starts, sizes, most):
    """Mean code length of held-out answers given their questions, stop token included; bits per byte of text."""
    nats = count = 0
    for row, start, size in list(zip(ids, starts, sizes, strict=True))[:most]:
        tokens = torch.from_numpy(row)
        losses = F.cross_entropy(forward(model, tokens[None, :-1]), tokens[1:], reduction="none")
        nats += losses[start - 1 :].sum().item()
        count += size
    return round(nats / math.log(2) / count, 4) if count else None


# Files


def write(path, data):
    """Write bytes, all or none of them."""
    write_atomically(path, lambda temporary: temporary.write_bytes(data))


def export(model, folder, text):
    """The model's folder as the hub lays it out, weights in bfloat16."""
    weights = {name: model.get_parameter(name).detach().bfloat16() for name in model.config.tensor_shapes()}
    settings = {
        "config.json": CONFIG,
        "generation_config.json": {"eos_token_id": CONFIG["eos_token_id"], "pad_token_id": END},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "mask_token": "<|mask|>",
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        },
    }
    for name, content in settings.items():
        write(folder / name, f"{json.dumps(content, indent=2)}\n".encode())
    write_atomically(folder / "model.safetensors", lambda path: save_file(weights, path, {"format": "pt"}))
    write(folder / "README.md", text.encode())


def card(report, options, final):
    """The model card."""
    length = f"--steps {options.steps}" if options.steps is not None else f"--minutes {options.minutes:g}"
    limit = f" --limit {options.limit}" if options.limit is not None else ""
    scores = "\n".join(
        f"| {name} | {report['documents'].get(name, 0):,} | {score} |"
        for name, score in report["held_out_bits_per_byte"].items()
    )
    return f"""# A tiny target

A Qwen3 decoder of {report["parameters"]:,} parameters (6 layers, hidden size 192, 6 query and 2 key-value heads of 32,
tied embedding, context {CONTEXT:,}) with a byte-level BPE tokenizer of {WORDS:,} tokens and ChatML.  A target for tests
and demonstrations of speculative decoding, small enough to train and to measure on a laptop.
{"" if final else chr(10) + "**Training was still going on when this was written.**" + chr(10)}
## Data

Text of one Python {platform.python_version()} installation, read at training time and not stored: standard-library
functions and classes (code), docstrings, comments and the language manual (prose), requests in everyday sentences made
from docstrings (chat), and problems from a seeded generator (arithmetic).  One source file, topic or problem in
{corpus.HELD_OUT} is held out.  Bits per byte are of held-out answers given their questions, stop token included.

| domain | training documents | held-out bits per byte |
|---|---|---|
{scores}

## Training

    python examples/train_tiny_target.py {length} --seed {options.seed}{limit}

{report["steps"]:,} steps of {BATCH:,} tokens, {report["tokens"] / 1e6:.1f} million tokens in all
({report["tokens"] / report["epoch_tokens"]:.2f} passes over {report["epoch_tokens"] / 1e6:.2f} million), in
{report["minutes"]:.0f} minutes at {report["tokens_per_second"]:,} tokens per second; last training loss
{report["training_loss"]} nats per token.  AdamW (0.9, 0.95), learning rate {LEARNING_RATE:g} with warm-up and cosine
decay, weight decay 0.1 on matrices, gradients clipped to norm 1.  The loss is over all tokens: a question's signature
or docstring is text of the same kind as an answer.  Rows of 512 tokens, of 1,024 at the end; documents follow
each other without gaps.  float32 on {options.threads} CPU threads ({hardware("cpu")}), PyTorch {torch.__version__}.

## Limits

It continues patterns.  Its facts, its code and most of its sums are wrong, it knows English from documentation only,
and it was trained on single exchanges.  Numbers measured on it say how a method works, not how well it works on a large
model.
"""


def parse(arguments):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, help="the model's folder; the training state is OUT.checkpoint")
    parser.add_argument("--minutes", type=float, default=100, help="length of the training by the clock")
    parser.add_argument("--steps", type=int, help="length in steps instead: reproducible to the bit")
    parser.add_argument("--save-minutes", type=float, default=10, help="minutes between two saved states")
    parser.add_argument("--resume", action="store_true", help="go on from OUT.checkpoint")
    parser.add_argument("--limit", type=int, help="so many source files, topics and problems only: a trial")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.threads = torch.get_num_threads()
    return options


if __name__ == "__main__":
    main()
