"""Names of transformers, peft, ModelCenter, BMTrain and Megatron-LM that do not exist here, and what does the same: the error that
such a name raises says it."""

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import wraps
from inspect import signature
from typing import NoReturn, ParamSpec, TypeVar

from .errors import counted, nearest, refuse

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

ALWAYS = "leave it out: it is always so"
IDLE = "leave it out: it has no effect here"
SAME = {  # arguments that are called otherwise here, and mean the same
    "add_special_tokens": "special",
    "new_num_tokens": "vocab",
    "pretrained_model_name_or_path": "name",
    "save_directory": "folder",
}

FORWARD = {  # arguments of a forward, transformers' and ModelCenter's
    "cache_position": "leave it out: past_key_values knows its length",
    "cross_attn_head_mask": "leave it out: no head is masked here",
    "decoder_head_mask": "leave it out: no head is masked here",
    "decoder_inputs_embeds": "decoder_input_ids",
    "decoder_length": "decoder_attention_mask, 1 where a token is",
    "encoder_attention_mask": "attention_mask, which is the encoder's",
    "encoder_hidden_states": "input_ids: the model runs its encoder itself",
    "encoder_outputs": "past_key_values of the first step, which keeps the encoder's output",
    "head_mask": "leave it out: no head is masked here",
    "length": "attention_mask, 1 where a token is",
    "mems": "past_key_values",
    "next_sentence_label": "leave it out: only masked words are learned here",
    "output_decoder_attentions": "leave it out: attention here keeps no weights",
    "output_decoder_hidden_states": "output_hidden_states",
    "output_logits": "leave it out: logits are there, in training only without labels",
    "output_pooler_output": "task='backbone' where the model is loaded: its output has pooler_output",
    "past_key_value": "past_key_values",
    "seq_idx": "position_ids, which begin anew with each sequence, or cu_seq_lens_q and cu_seq_lens_k",
}
OUTPUT = {  # what a forward returns
    "attentions": "leave it out: attention here keeps no weights",
    "cross_attentions": "leave it out: attention here keeps no weights",
    "decoder_attentions": "leave it out: attention here keeps no weights",
    "decoder_hidden_states": "hidden_states",
    "encoder_attentions": "leave it out: attention here keeps no weights",
    "encoder_hidden_states": "past_key_values.memory, the last of them, with use_cache=True",
    "encoder_last_hidden_state": "past_key_values.memory, with use_cache=True",
}
LOAD = {  # arguments of from_pretrained
    "attn_implementation": "leave it out: the fastest of those that compute the same is taken",
    "cache_dir": "the variable HF_HOME",
    "device_map": "device, or machine to share the model out among devices",
    "force_download": "leave it out: what is new under that name is fetched",
    "ignore_mismatched_sizes": "num_labels or id2label, for a classifier's head; other changes of shape are refused",
    "label2id": "id2label",
    "load_in_4bit": "adapter=mc.AdapterConfig(name='lora', quantize='nf4')",
    "load_in_8bit": "adapter=mc.AdapterConfig(name='lora', quantize='int8')",
    "low_cpu_mem_usage": ALWAYS,
    "offload_folder": "leave it out: machine=mc.Machine(offload=True) keeps weights in the host's memory, and none on a disk",
    "output_loading_info": "the model's load_report",
    "proxies": "the variable HTTPS_PROXY",
    "quantization_config": "adapter=mc.AdapterConfig(name='lora', quantize='nf4')",
    "state_dict": "load_state_dict of the model",
    "strict": f"{ALWAYS}; load_report says what was new or ignored",
    "subfolder": "the path of the folder itself",
    "token": "the variable HF_TOKEN",
    "torch_dtype": "dtype",
    "trust_remote_code": "leave it out: no code of a folder is run",
    "use_auth_token": "the variable HF_TOKEN",
    "variant": "the path of a folder with these files alone",
    "max_memory": "machine to share the model out among devices",
    "generation_config": "model.generation_config, behind it",
    "from_tf": "convert them with transformers first",
    "key_mapping": "names that transformers writes; its save_pretrained first",
    "use_safetensors": ALWAYS,
    "gguf_file": "convert it with transformers first",
    "resume_download": IDLE,
    "weights_only": ALWAYS,
    # keys of a config, which transformers takes there too
    **dict.fromkeys(("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"), "config={'attn_dropout': ...}"),
    **dict.fromkeys(("dropout_rate", "hidden_dropout", "hidden_dropout_prob", "resid_pdrop"), "config={'dropout': ...}"),
    "classifier_dropout": "config={'head_dropout': ...}",
    "embd_pdrop": "config={'embed_dropout': ...}",
    "output_attentions": "leave it out: attention here keeps no weights",
    "output_hidden_states": "output_hidden_states of a call",
    "pad_token_id": "model.config.pad_token_id, behind it",
    "return_dict": f"{ALWAYS}, unless a call says return_dict=False",
    "use_cache": "use_cache of a call",
}
SAVE = {  # arguments of save_pretrained
    "is_main_process": f"{ALWAYS}, for every process calls and writes its part",
    "push_to_hub": "leave it out, and upload the folder: hf upload NAME FOLDER",
    "safe_serialization": ALWAYS,
    "save_function": IDLE,  # accelerate's idiom
    "state_dict": "leave it out: the model's own weights are written",
    "token": "leave it out, and upload the folder: hf upload NAME FOLDER",
    "variant": "leave it out",
}
RESIZE = {  # arguments of resize_token_embeddings
    "mean_resizing": "leave it out: new rows are drawn as in a new model",
}
MODEL = {  # attributes of a model
    "active_adapters": "model.adapter",
    "add_adapter": "mc.add_adapter(model, mc.AdapterConfig(...))",
    "cls_projection": "model.head.out, of task='classify'",
    "get_decoder": "model.decoder, or mc.load(name, task='backbone') for hidden states",
    "get_encoder": "model.encoder, or mc.load(name, task='embed') for vectors of texts",
    "get_memory_footprint": "sum(p.nbytes for p in model.parameters())",
    "init_weights": "mc.build(name, seed=0), which draws them",
    "input_embedding": "model.embed.tokens; its width is model.config.dim",
    "lm_head": "model.head.out",
    "load_adapter": "mc.load(folder of the adapter), which loads its base too",
    "name_or_path": "model.source",
    "num_parameters": "sum(p.numel() for p in model.parameters())",
    "output_projection": "model.head.out",
    "pooler": "mc.load(name, task='backbone'), whose output has pooler_output",
    "position_embedding": "model.embed.positions",
    "push_to_hub": "save_pretrained(folder), then: hf upload NAME FOLDER",
    "set_attn_implementation": "leave it out: the fastest of those that compute the same is taken",
    "set_input_embeddings": "resize_token_embeddings(size), or values copied into get_input_embeddings().weight",
    "set_output_embeddings": "values copied into model.head.out.weight",
    "token_type_embedding": "model.embed.segments",
}
GENERATE = {  # arguments of generate
    "assistant_model": "leave it out: nothing is guessed ahead here",
    "beam_size": "num_beams",
    "cache_position": "leave it out: the cache knows its length",
    "custom_generate": "leave it out: no code of a folder is run",
    "decoder_attention_mask": "leave it out: a target begins with decoder_start_token_id",
    "decoder_input_ids": "decoder_start_token_id, or prefix_allowed_tokens_fn, which can force the first tokens",
    "encoder_outputs": "input_ids: the model runs its encoder itself",
    "generate_length": "max_new_tokens",
    "inputs": "input_ids, or the ids without a name",
    "inputs_embeds": "input_ids",
    "logits_warper": "logits_processor, or temperature, top_k, top_p, min_p",
    "negative_prompt_attention_mask": "leave it out: there is no guidance here",
    "negative_prompt_ids": "leave it out: there is no guidance here",
    "past_key_values": "leave it out: every call begins with the prompt",
    "position_ids": "leave it out: attention_mask says where each row begins",
    "repetition_window": "leave it out: repetition_penalty looks at all tokens",
    "token_type_ids": "leave it out: return_token_type_ids=False of the tokenizer",
}
TOKENIZER = {  # attributes of a tokenizer
    "__call__": "encode(text), and torch.tensor([ids]); batches with masks by transformers.AutoTokenizer, of the same folder",
    "add_special_tokens": "a tokenizer is trained with them, or has them in its file: transformers.AutoTokenizer adds and saves",
    "add_tokens": "transformers.AutoTokenizer of the same folder adds and saves; then model.resize_token_embeddings",
    "all_special_ids": "[tokenizer.token_to_id(token) for token in tokenizer.special.values()]",
    "apply_chat_template": "transformers.AutoTokenizer of the same folder; modelcenter generate MODEL PROMPT chat=true does it",
    "batch_decode": "[tokenizer.decode(ids) for ids in rows]",
    "batch_encode_plus": "encode_all(texts), or transformers.AutoTokenizer of the same folder",
    "bos_token": "tokenizer.special['bos']",
    "bos_token_id": "bos_id",
    "convert_ids_to_tokens": "tokenizer.raw.id_to_token(id)",
    "convert_tokens_to_ids": "token_to_id(token)",
    "encode_plus": "encode(text)",
    "eos_token": "tokenizer.special['eos']",
    "eos_token_id": "eos_id",
    "from_pretrained": "mc.load_tokenizer(name)",
    "get_vocab": "tokenizer.vocabulary",
    "mask_token_id": "mask_id",
    "pad": "transformers.AutoTokenizer of the same folder",
    "pad_token": "tokenizer.special['pad']",
    "pad_token_id": "pad_id",
    "padding_side": "transformers.AutoTokenizer of the same folder, which pads",
    "save_pretrained": "save(folder)",
    "tokenize": "[tokenizer.raw.id_to_token(id) for id in tokenizer.encode(text)]",
    "unk_token_id": "unk_id",
}
ENCODE = {  # arguments of a tokenizer's encode and decode
    "clean_up_tokenization_spaces": "leave it out: no space is taken away",
    "max_length": "encode(text)[:length], or encode_pair(text, limit=length), which keeps the template's end",
    "padding": "transformers.AutoTokenizer of the same folder, which pads",
    "return_tensors": "leave it out, and torch.tensor([tokenizer.encode(text)])",
    "skip_special_tokens": f"{ALWAYS}, unless special=True",
    "text_pair": "encode_pair(first, second)",
    "truncation": "encode_pair(text, limit=length)",
}
RECIPE = {  # keys of the command lines of ModelCenter, Megatron-LM, Trainer, TRL and their example scripts, by what to give here
    name: ours
    for ours, names in {
        "adapter.alpha": "lora_alpha",
        "adapter.dropout": "lora_dropout",
        "adapter.name=dora": "use_dora",
        "adapter.name=lora, or the recipe lora": "lora peft_config use_lora use_peft",
        "adapter.quantize=int8, or the recipe qlora": "load_in_8bit",
        "adapter.quantize=nf4, or the recipe qlora": "bnb_4bit_quant_type load_in_4bit qlora quantization_config",
        "adapter.rank": "lora_r r",
        "adapter.rslora": "use_rslora",
        "adapter.targets": "lora_target_modules target_modules",
        "batch": "global_batch_size train_batch_size",
        "best": "greater_is_better load_best_model_at_end metric_for_best_model",
        "batch: the sequences of all processes": "split_batches",
        "micro_batch per GPU; batch is the total over all GPUs": "batch_size",
        "config.dim": "d_model dim hidden_size n_embd",
        "config.dropout": "hidden_dropout",
        "config.heads": "heads n_head num_attention_heads num_heads",
        "config.hidden": "ffn_hidden_size",
        "config.layers": "layers n_layer num_hidden_layers num_layers",
        "config.positions": "max_position_embeddings",
        "config: fields of the model, config.dropout=0.1": "model_init_kwargs",
        "data.eval_fraction": "split validation_split_percentage",
        "data.eval_path": "do_eval eval_file eval_iters valid_data_path",
        "data.group_by_length": "length_column_name sortish_sampler train_sampling_strategy",
        "data.label_key, of words data.tags_key": "label_column_name",
        "data.packing": "eval_packing packing_strategy",
        "data.packing=true, on jsonl with a line of text in each row": "line_by_line",
        "data.path": "base_path data_path train_data_path",
        "data.path, a file with as many rows": "max_eval_samples max_predict_samples max_train_samples",
        "data.path=datasets:NAME,CONFIG": "dataset_config dataset_config_name",
        "data.path=datasets:NAME:SPLIT and data.eval_path":
            "dataset_test_split dataset_train_split test_split_name train_split_name validation_split_name",
        "data.path=FILE or datasets:NAME,CONFIG, or the recipe superglue/NAME": "dataset dataset_name",
        "data.prompt_key and data.response_key: the response alone counts": "completion_only_loss",
        "data.seq_len": "block_size cutoff_len max_encoder_length max_length max_source_length seq_length sequence_length",
        "data.shuffle": "shuffle_dataset shuffle_train_dataset",
        "data.source_key=translation.en and data.target_key=translation.de": "source_lang target_lang",
        "data.target_key": "summary_column",
        "data.target_len": "max_decoder_length max_target_length",
        "data.text_key, or data.source_key": "dataset_text_field text_column text_column_name",
        "data.text_key, and data.pair_key for a second text": "text_column_names",
        "eval_steps": "eval_delay eval_interval eval_on_start eval_strategy evaluation_strategy",
        "generation.num_beams, generation.top_p ...: each is a key": "generation_config",
        "generation.forced_bos_token_id": "forced_bos_token",
        "generation.max_new_tokens": "generation_max_length val_max_target_length",
        "generation.num_beams": "beam_size generation_num_beams num_beams",
        "logging_steps": "inspect_iters log_interval logging_strategy",
        "machine.compile": "jit_mode_eval torch_compile torch_compile_backend torch_compile_mode torchdynamo",
        "machine.deterministic": "full_determinism",
        "machine.device=cpu": "no_cuda use_cpu",
        "machine.devices, or CUDA_VISIBLE_DEVICES=2,3 before the command": "device_ids gpu_ids gpus n_gpu num_gpus",
        "machine.fsdp": "fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap sharded_ddp",
        "machine.async_save": "non_blocking",
        "machine.fsdp and machine.zero": "deepspeed use_distributed_optimizer zero_level zero_stage",
        "machine.fsdp or machine.tensor_parallel: there are no pipelines yet": "pipe_size pipeline_model_parallel_size",
        "machine.tensor_parallel, fsdp and replicate": "parallelism_config",
        "machine.offload": "cpu_offload fsdp_offload_params offload offload_optimizer offload_param zero_offload",
        "machine.recompute":
            "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs "
            "recompute_activations recompute_granularity use_checkpoint",
        "machine.tensor_parallel": "tensor_model_parallel_size tp_size",
        "machine.timeout": "ddp_timeout",
        "max_grad_norm": "clip_grad gradient_clipping",
        "max_steps": "end_iter max_train_steps train_iters",
        "metrics: [bleu, chrf], [rouge] ...": "predict_with_generate",
        "metrics: [], for the loss alone": "prediction_loss_only",
        "micro_batch: left out, it is derived": "auto_find_batch_size",
        "micro_batch":
            "micro_batch_size per_device_batch_size per_device_eval_batch_size per_gpu_eval_batch_size per_gpu_train_batch_size",
        "model": "model_name pretrained_model",
        "model, with init=random and config for a new one": "config_name config_overrides model_config model_type",
        "model=FOLDER, which hf download NAME --revision REVISION gives": "model_revision revision",
        "num_epochs": "epochs num_epoch",
        "objective": "lora_task_type",
        "objective=regress, or similarity of two texts": "do_regression",
        "optimizer.betas, optimizer.eps ...: each is a key": "optim_args",
        "optimizer.eps": "adam_eps",
        "optimizer.lr; under noam theirs over the root of the warm-up": "start_lr",
        "optimizer.name and optimizer.moments": "optim",
        "optimizer.name=adafactor": "adafactor",
        "output_dir": "logging_dir run_name save save_dir save_name",
        "patience": "early_stopping_patience",
        "precision": "bf16_full_eval dtype fp16_full_eval half mixed_precision torch_dtype",
        "report_to, and the variable WANDB_PROJECT": "project with_tracking",
        "report_to, and the variables that trackio reads": "trackio_bucket_id trackio_space_id trackio_static_space_id",
        "resume": "num_iter start_step",
        "resume, or model for weights alone": "load load_dir",
        "leave it out: no run is overwritten: remove its folder, or give another output_dir": "overwrite_output_dir",
        "save_steps": "checkpointing_steps save_interval save_iters save_strategy",
        "save_steps: of a state the verb convert makes a model": "save_only_model",
        "schedule.min_lr_ratio, schedule.power ...: each is a key": "lr_scheduler_kwargs",
        "schedule.min_lr_ratio": "min_lr",
        "schedule.name": "lr_decay_style lr_scheduler",
        "schedule.name: a decay lasts as long as the run, of wsd schedule.decay_steps": "lr_decay_iters lr_decay_steps",
        "schedule.warmup_steps": "lr_warmup_fraction lr_warmup_iters num_warmup_steps warmup warmup_iter warmup_iters",
        "seed": "data_seed",
        "the recipe classify, which finds the labels in the data": "cls_head",
        "the recipe glue/NAME or superglue/NAME": "task_name",
        "the recipe instruct: what the assistant says alone counts": "assistant_only_loss",
        "the recipe squad/v2, where some questions have no answer": "null_score_diff_threshold version_2_with_negative",
        "the verb evaluate, after the run": "do_predict test_file",
        "the verb generate, after the run": "do_generate",
        "tokenizer": "merge_file tokenizer_model tokenizer_name_or_path tokenizer_type vocab_file",
        "hf upload NAME RUN/model, after the run":
            "hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy push_to_hub push_to_hub_model_id "
            "push_to_hub_organization",
        "leave it out: batches are made ahead by a thread":
            "dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor "
            "dataloader_in_order dataloader_multiprocessing_context dataset_num_proc num_workers preprocessing_num_workers",
        "leave it out: a run goes on at the very sample": "ignore_data_skip",
        "leave it out: a run that is asked to end saves its state": "enable_jit_checkpoint",
        "leave it out: a step that is not finite is skipped and counted": "logging_nan_inf_filter",
        "leave it out: an evaluation adds up its batches, and keeps no logits":
            "batch_eval_metrics eval_accumulation_steps eval_do_concat_batches eval_use_gather_object",
        "leave it out: an objective knows its labels": "label_names",
        "leave it out: devices are CPUs and CUDA's GPUs": "tpu_metrics_debug tpu_num_cores use_ipex use_mps_device xpu_backend",
        "leave it out: each metric reads what it needs": "include_for_metrics include_inputs_for_metrics",
        "leave it out: fp32 is not rounded to TF32; precision=bf16 is faster": "tf32",
        "leave it out: metrics have tokens and tokens_per_second": "include_num_input_tokens_seen include_tokens_per_second",
        "leave it out: no hyperparameters are searched": "ray_scope",
        "leave it out: no noise is added to embeddings": "neftune_noise_alpha",
        "leave it out: no optimizer here updates matrices in a low rank": "optim_target_modules",
        "leave it out: nothing here goes through Accelerate": "accelerator_config",
        "leave it out: the first step is always printed": "logging_first_step",
        "leave it out: there are no callbacks": "restore_callback_states_from_checkpoint",
        "leave it out: weights are always written as safetensors": "save_safetensors",
        "leave it out: a batch may hold the end of one epoch and the beginning of the next": "dataloader_drop_last",
        "leave it out: a loss is divided by the targets of all processes": "average_tokens_across_devices",
        "leave it out: fields that no key names are not read": "remove_columns remove_unused_columns",
        "leave it out: gradients are averaged without DistributedDataParallel":
            "ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph",
        IDLE:
            "disable_tqdm dispatch_batches fp16_backend fp16_opt_level half_precision_backend log_level log_level_replica "
            "log_on_each_node mp_parameters overwrite_cache past_index save_on_each_node skip_memory_metrics "
            "torch_empty_cache_steps use_cache use_legacy_prediction_loop",
        "leave it out: kernels are fused, and logits are never held whole": "use_liger_kernel liger_kernel_config",
        "leave it out: no code of a folder is run": "trust_remote_code",
        "leave it out: rows are padded to the longest of a batch, which has no part in the loss":
            "ignore_pad_token_for_loss pad_to_max_length pad_to_multiple_of",
        "leave it out: set the variable HF_HOME": "cache_dir",
        "leave it out: set the variable HF_TOKEN": "hub_token push_to_hub_token token use_auth_token",
        "leave it out: the tokenizer's fast form is always taken": "use_fast_tokenizer use_fast",
        "leave it out: weights are read as they are needed": "low_cpu_mem_usage",
        "leave it out: it finds itself under precision=fp16":
            "initial_loss_scale loss_scale loss_scale_factor loss_scale_steps max_loss_scale min_loss_scale",
        "leave it out: processes are counted by --machine or machine.fsdp": "local_rank nproc_per_node num_processes",
        "leave it out: the fastest of those that compute the same is taken": "attn_implementation flash_attn use_flash_attn",
        "leave it out: set the variables NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT": "master_addr master_port nnodes node_rank",
        "leave it out: the verb says it": "do_train",
    }.items()
    for name in names.split()
}
SCHEDULE = {  # shapes of transformers' learning rate, by ours
    "constant_with_warmup": "constant, with schedule.warmup_steps",
    "cosine_with_min_lr": "cosine, with schedule.min_lr_ratio",
    "cosine_with_restarts": "cosine: nothing restarts here",
    "reduce_lr_on_plateau": "cosine, or wsd",
    "warmup_stable_decay": "wsd, with schedule.warmup_steps and schedule.decay_steps",
}
MODULE = {  # names of a package or of one of its modules, as patterns, by what there is here; the first that fits speaks
    pattern: ours
    for ours, patterns in {
        "no such family yet: modelcenter list models": "Roberta* GPTj* GPTJ* OPT* GLM* Longformer* ViT* CPM1* CPM2* CPM3*",
        "mc.AdapterConfig(name='lora', quantize='nf4')": "BitsAndBytesConfig",
        "mc.AdapterConfig(name='lora')": "LoraConfig",
        "options of model.generate, by their names": "GenerationConfig",
        "mc.load(name, device='meta').config": "*Config",
        "mc.load_tokenizer(name), or transformers.AutoTokenizer": "*Tokenizer tokenizer",
        "transformers' own, whose batches a forward takes; a recipe's objective makes its own": "DataCollator*",
        "mc.load(name), which takes any family; task= says which head": "AutoModel* Bert* GPT2*",
        "mc.load(folder of the adapter), which loads its base too": "PeftModel*",
        "mc.add_adapter(model, mc.AdapterConfig(...))": "get_peft_model",
        "model.generate, or transformers' own on a saved folder": "pipeline",
        "model.generate(ids, num_beams=3), or do_sample=True": "*BeamSearch *RandomSampling generation",
        "a recipe: modelcenter list keys, under their names too": "TrainingArguments*",
        "torch.optim.AdamW in a loop of your own; machine.offload=true of a command": "Adam*Optimizer",
        "mc.train(recipe)": "Trainer* OptimManager optim lr_scheduler loss FusedCrossEntropy",
        "mc.load(folder): a model of transformers becomes ours through what it has saved": "BMTrainModelWrapper",
        "no pipelines yet: mc.parallelize(model, machine) has FSDP and tensor parallelism": "PipelineTransformerBlockList",
        "mc.parallelize(model, machine), or --machine of a command; nothing else is to be called":
            "init_distributed init_parameters grouped_parameters wait_loader DistributedModule DistributedParameter "
            "ParameterInitializer Block *BlockList CheckpointBlock",
        "torch.distributed's own": "rank world_size synchronize sum_loss gather_result distributed nccl",
        "print on the first rank; a run's lines and metrics.jsonl have its numbers":
            "print_rank print_dict print_block print_inspect see_memory inspect utils",
        "model.save_pretrained(folder)": "save save_*",
        "modelcenter train RECIPE key=value ...": "get_args arguments",
        "data.path=FILE of a recipe; modelcenter tokenize makes token files": "*Dataset *Loader DATASET dataset",
        "modelcenter.layers, or torch.nn": "layer nn Linear",
    }.items()
    for pattern in patterns.split()
}
LAYERS = {  # layers of other families of transformers', by ours
    name: ours
    for ours, names in {
        "q": "q_proj query", "k": "k_proj key", "v": "v_proj value", "o": "o_proj out_proj",
        "q k v": "c_attn qkv_proj query_key_value", "gate": "gate_proj", "up": "c_fc dense_h_to_4h fc1 up_proj",
        "down": "dense_4h_to_h down_proj fc2",
    }.items()
    for name in names.split()
}  # fmt: skip
FIELDS = {  # fields of a config of ModelCenter, by ours
    "dim_ff": "hidden",
    "dim_head": "head_dim",
    "dim_model": "dim",
    "dropout_p": "dropout",
    "ffn_activate_fn": "act",
    "norm_eps": "eps",
    "num_decoder_layers": "decoder_layers",
    "num_encoder_layers": "layers",
    "num_heads": "heads",
    "num_heads_kv": "kv_heads",
    "num_layers": "layers",
    "position_bias_max_distance": "max_distance",
    "position_bias_num_buckets": "buckets",
    "position_size": "positions",
    "tied": "tie",
    "type_size": "segments",
    "vocab_size": "vocab",
}


def spoken_of(name: str) -> str | None:
    """What to use here for a name from another package."""
    return next((ours for pattern, ours in MODULE.items() if fnmatchcase(name, pattern)), None)


def no_family(name: str) -> str | None:
    """What to say of a model's name there, such as roberta-base, whose family is not here."""
    stem = name.lower().partition("-")[0]
    return next((ours for pattern, ours in MODULE.items() if ours.startswith("no such") and pattern.lower() == f"{stem}*"), None)


def within(section: str) -> dict[str, str]:
    """Of `RECIPE` what is of one section, as arguments of its dataclass."""
    return {name: ours.removeprefix(f"{section}.") for name, ours in RECIPE.items() if ours.startswith(f"{section}.")}


def refuse_argument(call: str, name: str, theirs: Mapping[str, str], known: Iterable[str]) -> NoReturn:
    """Refuse an argument that `call` does not take, and say what does the same, or which of its arguments is nearest."""
    refuse(None, f"{call}({name})", "no such argument", theirs.get(name) or nearest(name, known))


def arguments(theirs: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function refuse, in that way, every argument that it does not take, positional ones that it takes only by name
    (BMTrain's load takes a model and a file), and calls without a required one. It accepts the arguments in `SAME` under that name
    too. It ignores arguments of other packages that ask for nothing: None, False, or True where this is always so."""

    def nothing(name: str, value: object) -> bool:
        said = theirs.get(name)
        return said is not None and (value is None or said == IDLE or value is said.startswith(ALWAYS))

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        every = signature(function).parameters.values()
        parameters = [p for p in every if p.name not in ("self", "cls")]
        known = tuple(p.name for p in parameters)
        placed = [p.name for p in every if p.kind is p.POSITIONAL_OR_KEYWORD]
        needed = [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        more = any(p.kind is p.VAR_KEYWORD for p in parameters)  # what these are is another's to say
        own = len(every) - len(parameters)
        what = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not kwargs and len(needed) <= len(args) - own <= len(placed) - own:
                return function(*args, **kwargs)  # at once: a text may be short
            if len(args) > len(placed):
                wanted = f"{' and '.join(placed[own:])} alone, and the others by name" if placed[own:] else "all of them by name"
                refuse(None, what, f"{counted(len(args) - own, 'argument')} without a name", wanted)
            for alias in SAME.keys() & kwargs.keys() - known:
                if (name := SAME[alias]) in known:
                    if name in (*kwargs, *placed[: len(args)]):
                        refuse(None, f"{what}({alias})", f"given, and so is {name}", "they are one argument: keep one of them")
                    kwargs[name] = kwargs.pop(alias)
            for name in [] if more else [name for name in kwargs if name not in known]:
                if not nothing(name, kwargs.pop(name)):
                    refuse_argument(what, name, theirs, known)
            for name in needed:
                if name not in kwargs and name not in placed[: len(args)]:
                    refuse(None, f"{what}({name})", "missing", f"give it: {what}({name}=...)")
            return function(*args, **kwargs)

        return call

    return decorate


def made_by_name(theirs: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """The same for a dataclass, which refuses where it is made."""

    def decorate(cls: type[T]) -> type[T]:
        cls.__init__ = arguments(theirs)(cls.__init__)  # type: ignore[method-assign]  # of the class, which nobody has derived from yet
        return cls

    return decorate
