from trainer.models.own.module import *
