#!/bin/bash
set -eu
sed -i 's/a - b/a + b/' /app/calc.py
echo "$GREETING" > /app/greeting.txt
