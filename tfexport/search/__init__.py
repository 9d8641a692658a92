"""Source ids to hypotheses, over any runtime: greedy and beam search, sampling, and the rules of the next token."""
