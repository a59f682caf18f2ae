"""Layouts on which `dslpar prove` meets the mutants: together they cover what a layout can get wrong.

LAYOUTS["2d"].job()             # the job, resolved; `LAYOUTS["resume"].other()` the one that resumes it
"""

from __future__ import annotations

from typing import NamedTuple

from dslpar.layout.resolve import Job
from dslpar.linter import check

_GPT = "model = dict(type='GPT', num_layers=2, hidden_size=32, num_heads=4, vocab_size=256, max_seq_len=16)"
_LLAMA = (
    "model = dict(type='GPT', num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, vocab_size=256, "
    "max_seq_len=16, norm='rmsnorm', activation='swiglu', positions='rotary', bias=False, tie_embeddings=False)"
)
_OF_TRANSFORMERS = (
    "model = dict(type='transformers.LlamaForCausalLM', config=dict(vocab_size=256, hidden_size=32, "
    "intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2), "
    "lora=dict(r=3, lora_alpha=6, target_modules=['q_proj', 'v_proj', 'o_proj', 'down_proj']))"
)
_RESMLP = (
    "model = dict(type='ResMLP', num_layers=2, hidden_size=32, image_size=16, patch_size=4, num_channels=3, "
    "num_classes=10)"
)
_MOCO = (
    "model = dict(type='MoCo', num_layers=2, hidden_size=32, num_heads=4, image_size=16, patch_size=4, num_channels=3, "
    "projection_size=16, projection_hidden_size=32)"
)
_EXPERTS = (
    "model = dict(type='transformers.MixtralForCausalLM', config=dict(vocab_size=256, hidden_size=32, "
    "intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=6, "
    "num_experts_per_tok=2, sliding_window=None))"
)
_LATENT = (
    "model = dict(type='transformers.DeepseekV3ForCausalLM', config=dict(vocab_size=256, hidden_size=32, "
    "intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, "
    "num_key_value_heads=4, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, q_lora_rank=16, "
    "kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1))"
)
_REST = (
    "optimizer = dict(type='AdamW', lr=3e-3)\nlr_scheduler = dict(type='cosine', warmup_steps=1, min_lr=3e-4)\n"
    "train = dict(steps=10, clip_grad_norm=1.0)\n"
)


class Layout(NamedTuple):
    """A config and its number of ranks."""

    ranks: int
    text: str
    resumes: tuple[str, ...] = ()
    """Overrides of the layout that resumes its checkpoint; () if there is none."""

    def job(self) -> Job:
        """Return the resolved job."""
        return self._job(())

    def other(self) -> Job | None:
        """Return the job that resumes it."""
        return self._job(self.resumes) if self.resumes else None

    def _job(self, overrides: tuple[str, ...]) -> Job:
        return check.check(check.load_text(self.text, "layout.py", overrides), self.ranks, forecasts=False).job


def _layout(ranks: int, parallel: str, model: str = _GPT, rest: str = "", resumes: tuple[str, ...] = ()) -> Layout:
    return Layout(ranks, f"parallel = dict({parallel})\n{model}\n{_REST}{rest}\n", resumes)


LAYOUTS = {
    "1d-sequence": _layout(
        2, "tensor=dict(size=2, mode='1d', sequence=True)", rest="batch = dict(global_size=4, accumulation=2)"
    ),
    "1d-sequence-pipe": _layout(
        4,
        "pipeline=2, tensor=dict(size=2, mode='1d', sequence=True)",
        rest="batch = dict(global_size=8, accumulation=4)",
    ),
    "2d": _layout(4, "tensor=dict(size=4, mode='2d')", _LLAMA, "batch = dict(global_size=8, accumulation=2)"),
    "cuboid": _layout(
        4,
        "tensor=dict(size=4, mode='cuboid', shape=(1, 2, 2), residual='sequence', inner='batch')",
        rest="batch = dict(global_size=8, accumulation=2)",
    ),
    "ring-1d": _layout(
        4, "context=dict(size=2, impl='ring'), tensor=dict(size=2, mode='1d')", _LLAMA, "batch = dict(global_size=4)"
    ),
    "ring-1d-zero1": _layout(
        4,
        "context=dict(size=2, impl='ring'), tensor=dict(size=2, mode='1d', sequence=True)",
        rest="zero = dict(stage=1)\nbatch = dict(global_size=4)",
    ),
    "ulysses-zero1": _layout(
        4,
        "context=dict(size=2, impl='ulysses')",
        rest="zero = dict(stage=1)\nbatch = dict(global_size=8, accumulation=2)\nactivation_checkpoint = 1",
    ),
    "zero1": _layout(2, "", rest="zero = dict(stage=1)\nbatch = dict(global_size=8, accumulation=2)"),
    "zero1-once": _layout(2, "", rest="zero = dict(stage=1, overlap_param_gather=True)\nbatch = dict(global_size=8)"),
    "zero2": _layout(
        4, "tensor=dict(size=2, mode='1d', sequence=True)", rest="zero = 2\nbatch = dict(global_size=8, accumulation=2)"
    ),
    "zero3": _layout(2, "", rest="zero = dict(stage=3)\nbatch = dict(global_size=8, accumulation=2)"),
    "data": _layout(4, "tensor=dict(size=2, mode='1d')", rest="batch = dict(global_size=8, accumulation=2)"),
    "interleaved": _layout(
        4,
        "pipeline=2",
        _GPT.replace("num_layers=2", "num_layers=4"),
        "schedule = dict(type='interleaved', num_model_chunks=2)\nbatch = dict(global_size=16, accumulation=4)",
    ),
    "zero-bubble": _layout(
        4,
        "pipeline=2, tensor=dict(size=2, mode='1d', sequence=True)",
        _LLAMA,
        "schedule = dict(type='zero_bubble')\nbatch = dict(global_size=8, accumulation=4)",
    ),
    "lora": _layout(
        4,
        "tensor=dict(size=2, mode='1d')",
        _OF_TRANSFORMERS,
        "batch = dict(global_size=8, accumulation=2)\ndata = dict(seq_len=16)",
    ),
    "3d": _layout(8, "tensor=dict(size=8, mode='3d')", rest="batch = dict(global_size=8)"),
    "3d-heads": _layout(
        8, "tensor=dict(size=8, mode='3d', residual='hidden', inner='heads')", rest="batch = dict(global_size=8)"
    ),
    "2.5d": _layout(8, "tensor=dict(size=8, mode='2.5d', depth=2)", rest="batch = dict(global_size=8)"),
    "overlap": _layout(
        4, "tensor=dict(size=4, mode='2d', comm_overlap=True)", _GPT, "batch = dict(global_size=8, accumulation=2)"
    ),
    "overlap-1d": _layout(
        2, "tensor=dict(size=2, mode='1d', sequence=True, comm_overlap=True)", rest="batch = dict(global_size=4)"
    ),
    "hybrid": _layout(4, "context=dict(size=4, impl='hybrid', ulysses_size=2)", _LLAMA, "batch = dict(global_size=4)"),
    "resmlp": _layout(
        4, "tensor=dict(size=2, mode='1d', sequence=True)", _RESMLP, "batch = dict(global_size=8, accumulation=2)"
    ),
    "moco": _layout(4, "tensor=dict(size=2, mode='1d')", _MOCO, "batch = dict(global_size=8)"),
    "experts": _layout(
        2,
        "tensor=dict(size=2, mode='1d', sequence=True)",
        _EXPERTS,
        "batch = dict(global_size=4)\ndata = dict(seq_len=16)",
    ),
    "latent": _layout(
        2, "tensor=dict(size=2, mode='1d')", _LATENT, "batch = dict(global_size=4)\ndata = dict(seq_len=16)"
    ),
    "chunks": _layout(
        2,
        "tensor=dict(size=2, mode='1d', sequence=True)",
        rest="activation_checkpoint = dict(interval=1, mlp_chunks=2)\nbatch = dict(global_size=4, accumulation=2)\n"
        "train = dict(steps=10, clip_grad_norm=1.0, loss_chunks=2)",
    ),
    "resume": _layout(
        4,
        "tensor=dict(size=2, mode='1d')",
        rest="zero = dict(stage=1)\nbatch = dict(global_size=8, accumulation=2)",
        resumes=("parallel.tensor=None", "parallel.pipeline=2", "zero.stage=0"),
    ),
    "resume-replicas": _layout(
        4,
        "tensor=dict(size=2, mode='1d')",
        rest="batch = dict(global_size=8, accumulation=2)",
        resumes=("parallel.tensor=None", "zero.stage=1"),
    ),
    "resume-pipe": _layout(
        4,
        "pipeline=2",
        rest="batch = dict(global_size=8, accumulation=2)",
        resumes=("parallel.pipeline=2",),
    ),
    "resume-same": _layout(
        2,
        "",
        rest="zero = dict(stage=1)\nbatch = dict(global_size=8, accumulation=2)\n"
        "optimizer = dict(type='SGD', lr=0.1, momentum=0.9)",
        resumes=("zero.stage=1",),
    ),
    "resume-zero3": _layout(
        2, "", rest="zero = dict(stage=3)\nbatch = dict(global_size=8, accumulation=2)", resumes=("zero.stage=2",)
    ),
}
"""Layouts by name."""
