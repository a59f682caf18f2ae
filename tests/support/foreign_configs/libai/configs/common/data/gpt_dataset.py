from libai.config import LazyCall
from libai.data import build_nlp_test_loader, build_nlp_train_val_test_loader
from libai.data.data_utils import get_indexed_dataset
from libai.data.datasets import GPT2Dataset
from libai.tokenizer import GPT2Tokenizer
from omegaconf import OmegaConf

tokenization = OmegaConf.create()
tokenization.tokenizer = LazyCall(GPT2Tokenizer)(vocab_file="/v.json", merges_file="/m.txt", do_lower_case=True)
tokenization.append_eod = False
tokenization.make_vocab_size_divisible_by = 128

dataloader = OmegaConf.create()
dataloader.train = LazyCall(build_nlp_train_val_test_loader)(
    dataset=[
        LazyCall(GPT2Dataset)(
            name="gpt-2",
            data_prefix="/data/text",
            indexed_dataset=LazyCall(get_indexed_dataset)(
                data_prefix="/data/text", data_impl="mmap", skip_warmup=False
            ),
            max_seq_length=1024,
            seed=1234,
        ),
    ],
    train_val_test_num_samples=None,
    splits=[[949.0, 50.0, 1.0]],
    weights=[1.0],
    num_workers=4,
)
dataloader.test = [LazyCall(build_nlp_test_loader)(dataset=LazyCall(GPT2Dataset)(name="gpt-2"), num_workers=4)]
