"""From a question to the prompt that a judge is sent."""
