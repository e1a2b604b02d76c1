"""From ledgers to judgements: scores, intervals, comparisons and the report a person reads."""
