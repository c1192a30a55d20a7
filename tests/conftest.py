"""Tests import the flat files of the root. One thread: tiny models are faster so, and sums come in one order."""
import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
torch.set_num_threads(1)
