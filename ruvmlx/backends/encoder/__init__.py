"""The encoder backend computes vectors of texts with models of BERT's kind."""
