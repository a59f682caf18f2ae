"""Fine-tune a Hugging Face model, in full or by LoRA.

python examples/fine_tune.py --config examples/configs/fine_tuning.py --make     # a tiny model with random weights
deepspeed --num_gpus 2 examples/fine_tune.py --config examples/configs/fine_tuning.py
deepspeed --num_gpus 2 examples/fine_tune.py --config examples/configs/fine_tuning.py --lora
"""

from __future__ import annotations

import argparse

import dslpar

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def make(folder: str) -> None:
    """Write a Llama with random weights, in the format of `save_pretrained`; its tokens are bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes)).save_pretrained(folder)


def print_weights_trained(event: dslpar.Event) -> None:
    """Print the number of trained tensors on this rank; with LoRA, only adapters are trained."""
    if event.name == "end" and event.engine.groups.rank == 0:
        trained = sum(p.requires_grad for _, p in event.engine.named_parameters())
        print(f"{trained} tensors of rank 0 were trained, in {event.step} steps", flush=True)


def main() -> None:
    """Write the folder, or fine-tune the model in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", action="store_true", help="write a tiny model to --folder, and stop")
    parser.add_argument("--folder", default="outputs/tiny_llama", help="where --make writes, as the config has it")
    parser.add_argument("--lora", action="store_true", help="train low-rank adapters, and keep the weights as they are")
    args = dslpar.arguments(parser)
    if args.make:
        make(args.folder)
        return
    lora = [f"model.lora={LORA!r}"] if args.lora else []
    run = dslpar.start(args.config, [*lora, *args.overrides], args.trust)
    engine, train_data, eval_data, _ = dslpar.initialize(run)
    flags = {"resume": args.resume, "eval_only": args.eval_only, "dry_run": args.dry_run}
    dslpar.fit(run, engine, train_data, eval_data, hooks=[print_weights_trained], **flags)


if __name__ == "__main__":
    main()
