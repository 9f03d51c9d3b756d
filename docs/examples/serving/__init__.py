"""An OpenAI-compatible server over the scheduler of ../serve.py, of the standard library alone.

python -m docs.examples.serving --port 8000                     # random weights, bytes as tokens
python -m docs.examples.serving --port 8000 --model FOLDER      # a checkpoint of transformers
"""
