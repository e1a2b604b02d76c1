"""Entry points for people and for `ray job submit`. May import every package; nothing imports it."""
