from trainer.data.dataset import *
