"""Supervised fine-tuning with TRL's SFTTrainer on flexible groups: LoRA, and loss on what the assistant says.

What FlexCP adds are the three lines marked `flexcp`. The model is tiny and random, the chats are made up, so
that it runs anywhere in a minute; give the folder of a model and a .jsonl of chats for the real thing::

    torchrun --nproc-per-node 2 examples/transformers_sft.py --output /tmp/sft
"""

from __future__ import annotations

import argparse
import random

import torch
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config
from trl import SFTConfig, SFTTrainer

import flexcp  # flexcp
from datasets import Dataset, load_dataset

CHAT = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|end|>' }}{% endif %}{% endfor %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and the marks of a chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    marks = ["<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>", additional_special_tokens=marks
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def tiny_model(vocab: int) -> AutoModelForCausalLM:
    """A Qwen3 of two layers."""
    return AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=vocab,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            pad_token_id=None,
        )
    )


def made_up_chats(count: int, seed: int) -> Dataset:
    """Sums, and explanations of very different lengths."""
    chance = random.Random(seed)
    chats = []
    for _ in range(count):
        a, b = chance.randint(0, 99), chance.randint(0, 99)
        steps = " ".join(
            f"{a} and {i} make {a + i}." for i in range(1, 1 + min(b, int(chance.paretovariate(0.7))))
        )
        chats.append(
            {
                "messages": [
                    {"role": "user", "content": f"What is {a} + {b}?"},
                    {"role": "assistant", "content": f"{steps} It is {a + b}."},
                ]
            }
        )
    return Dataset.from_list(chats)


def main() -> None:
    """Train, save, and say the loss on held-out chats."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder of a model; a tiny random one without it")
    parser.add_argument("--chats", help=".jsonl with a list of messages a line; made-up ones without it")
    parser.add_argument("--output", default="runs/sft")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens-per-rank", type=int, default=512)
    parser.add_argument("--hardware", help="of a rank, needed on GPUs: h100, or the .json of flexcp profile")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    tokens = options.tokens_per_rank
    tokenizer = AutoTokenizer.from_pretrained(options.model) if options.model else tiny_tokenizer()
    model = (
        AutoModelForCausalLM.from_pretrained(options.model) if options.model else tiny_model(len(tokenizer))
    )
    chats = (
        load_dataset("json", data_files=options.chats, split="train")
        if options.chats
        else made_up_chats(200, seed=1)
    )
    split = chats.train_test_split(test_size=16, seed=0)
    args = SFTConfig(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        max_length=1024,
        packing=True,
        assistant_only_loss=True,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        logging_steps=1,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        seed=1,
    )
    trainer = flexcp.transformers.flexible(SFTTrainer)(  # flexcp
        groups=flexcp.transformers.Groups(tokens_per_rank=tokens, hardware=options.hardware),  # flexcp
        model=model,
        args=args,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    trainer.save_model(options.output)
    if trainer.is_world_process_zero():
        print(f"saved to {options.output}")


if __name__ == "__main__":
    main()
