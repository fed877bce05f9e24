"""TRL's SFTTrainer takes two steps on the CPU with a tiny random model; prints what had loss, as TRL sees it.

Usage: train_trl.py FILE. FILE is JSON lines of prompt and completion, or of input_ids and labels.
"""

import json
import sys
import tempfile

import torch
from datasets import load_dataset
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<pad>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and a token for each mark of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<|end|>")
    wrapped.chat_template = TEMPLATE
    return wrapped


torch.manual_seed(0)
processing = tokenizer()
config = LlamaConfig(
    vocab_size=max(len(processing), 512),
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    pad_token_id=processing.pad_token_id,
    eos_token_id=processing.eos_token_id,
)
dataset = load_dataset("json", data_files=sys.argv[1], split="train")
with tempfile.TemporaryDirectory() as folder:
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=SFTConfig(
            output_dir=folder,
            max_steps=2,
            per_device_train_batch_size=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            bf16=False,
            max_length=None,
            logging_steps=1,
            dataset_num_proc=None,
        ),
        train_dataset=dataset,
        processing_class=processing,
    )
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    result = trainer.train()
    moved = any(not torch.equal(one, other) for one, other in zip(before, trainer.model.parameters(), strict=True))
    rows = []
    for example in trainer.train_dataset:
        batch = trainer.data_collator([{key: example[key] for key in ("input_ids", "labels") if key in example}])
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        trained = [token for token, label in zip(ids, labels, strict=True) if label != -100]
        assert all(label in {-100, token} for token, label in zip(ids, labels, strict=True))
        rows.append({"ids": ids, "labels": labels, "trained": trained, "text": processing.decode(trained)})
print(json.dumps({"steps": result.global_step, "loss": result.training_loss, "moved": moved, "rows": rows}))
