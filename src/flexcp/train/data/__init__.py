"""Text on disk to samples in memory: documents, tokenizers, the length index.

No torch here: the launcher and `flexcp lengths` read data on machines that have none.
"""

from flexcp.train.data.dataset import TextDataset, open_dataset, open_documents, open_tokenizer
from flexcp.train.data.documents import Documents, Skipped
from flexcp.train.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, train_bpe

__all__ = [
    "ByteTokenizer",
    "Documents",
    "FileTokenizer",
    "Skipped",
    "TextDataset",
    "Tokenizer",
    "open_dataset",
    "open_documents",
    "open_tokenizer",
    "train_bpe",
]
