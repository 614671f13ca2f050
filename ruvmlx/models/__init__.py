"""Model name -> local files -> validated weights -> Model + tokenizer."""
