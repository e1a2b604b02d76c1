"""Any OpenAI-compatible server as a model: one chat completion at a time, within a run's shared limits.

Decisions are pure and know no clock: what a fault is (`fault`), how often to try again (`retry`), which key
(`keys`), how fast (`rates`), all of them together (`gate`), what a call costs (`prices`), whether the provider
browsed (`browsing`), and what the chunks of a stream amount to (`answer`). Effects are in `gatekeeper` (one actor
a run) and `client` (one a worker).
"""
