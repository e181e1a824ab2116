"""A small GPT-2 learns to count:  horovodish run -np 2 python examples/transformers_trainer.py

Transformers' Trainer on our process group. Needs: pip install 'transformers[torch]'
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import horovodish.torch.backend  # noqa: F401  (makes the backend known to PyTorch)

WORDS, LENGTH = 16, 12


def main():
    dist.init_process_group("horovodish")  # before TrainingArguments(), which takes the group that is there
    set_seed(0)
    starts = torch.arange(256) % WORDS
    sentences = (starts[:, None] + torch.arange(LENGTH)) % WORDS
    samples = [{"input_ids": each, "labels": each} for each in sentences]
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )

    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        use_cpu=not torch.cuda.is_available(),
        max_steps=60,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=samples, eval_dataset=samples)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"{arguments.world_size} ranks on {dist.get_backend()}, loss {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
