"""A user's model by policy, as in docs/transformers.md."""

model = dict(
    type="tests.support.own_decoder.OwnDecoder",
    config=dict(hidden_size=64, num_attention_heads=8, num_hidden_layers=2, max_position_embeddings=64),
    policy=dict(
        blocks=["blocks"],
        regions={"blocks.*.attn": ["query", "key", "value"], "blocks.*.mlp": ["up"]},
        outward=["blocks.*.attn.out", "blocks.*.mlp.down"],
    ),
)
