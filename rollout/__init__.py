"""Events and what agents do with them: tools, steps, episodes, the coordinator and the ledger."""
