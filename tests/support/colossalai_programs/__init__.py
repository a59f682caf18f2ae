"""Programs in the shape of ColossalAI's examples; `tests.support.ported_programs` runs them."""
