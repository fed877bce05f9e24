#!/bin/bash
# The reward is what the tests say, whatever else goes wrong.
reward=0
if cd /app && python3 /tests/check.py; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
