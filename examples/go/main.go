// Trains an adapter to answer a question and streams its answer, with the code that `buf generate` writes to gen.
// See docs/languages.md for how to build it.
//
//	TWINKLE_SERVER_URL=127.0.0.1:PORT TWINKLE_API_KEY=tml-... ./client
package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	datav1 "example.com/client/gen/twinkle/api/data/v1"
	modelv1 "example.com/client/gen/twinkle/api/model/v1"
	samplerv1 "example.com/client/gen/twinkle/api/sampler/v1"
	serverv1 "example.com/client/gen/twinkle/api/server/v1"
	tensorv1 "example.com/client/gen/twinkle/api/tensor/v1"
)

const (
	steps = 16
	// The file of this program is small; chunks of 1 MiB are recommended.
	chunkBytes = 64
	question   = "Who are you?"
	answer     = "I am Twinkle, and I train models."
)

func main() {
	log.SetFlags(0)
	connection, err := connect(os.Getenv("TWINKLE_SERVER_URL"), os.Getenv("TWINKLE_CA"))
	check(err)
	defer connection.Close()
	adapters := modelv1.NewAdapterServiceClient(connection)
	samplers := samplerv1.NewSamplerServiceClient(connection)
	// The key is sent with every call, and gRPC waits forever without a deadline.
	ctx := metadata.AppendToOutgoingContext(context.Background(), "authorization", "Bearer "+os.Getenv("TWINKLE_API_KEY"))
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()

	baseModel := os.Getenv("TWINKLE_MODEL")
	models := trainableModels(ctx, serverv1.NewServerServiceClient(connection))
	fmt.Println("models:", strings.Join(models, " "))
	if baseModel == "" {
		baseModel = models[0]
	}
	loaderID := openLoader(ctx, connection, baseModel)
	created, err := adapters.CreateAdapter(ctx, &modelv1.CreateAdapterRequest{
		RequestId:  newID(),
		BaseModel:  baseModel,
		LoraConfig: &modelv1.LoraConfig{LoraRank: proto.Int32(8)},
	})
	check(err)
	adapterID := created.Adapter.AdapterId
	version := train(ctx, modelv1.NewTrainingServiceClient(connection), adapterID, loaderID)
	sample(ctx, samplers, baseModel, &samplerv1.AdapterRef{
		AdapterId: adapterID,
		Version:   &samplerv1.AdapterRef_Exact{Exact: version},
	})

	refuse(ctx, adapters, baseModel)
	fmt.Println("deadline:", statusAtDeadline(ctx, samplers))
	fmt.Println("cancelled:", statusAfterCancel(ctx, samplers, baseModel))
}

// Opens a connection, which verifies the server with the authorities of a PEM file, if one is given.
func connect(address, authority string) (*grpc.ClientConn, error) {
	if authority == "" {
		return grpc.Dial(address, grpc.WithInsecure())
	}
	tls, err := credentials.NewClientTLSFromFile(authority, "")
	check(err)
	return grpc.Dial(address, grpc.WithTransportCredentials(tls))
}

func trainableModels(ctx context.Context, server serverv1.ServerServiceClient) []string {
	info, err := server.GetServerInfo(ctx, &serverv1.GetServerInfoRequest{})
	check(err)
	var names []string
	for _, service := range info.Services {
		for _, model := range service.BaseModels {
			if model.IsTrainable {
				names = append(names, model.BaseModel)
			}
		}
	}
	return names
}

// Prepares training batches on the server, which tokenizes the chats, and returns the id of their loader.
func openLoader(ctx context.Context, connection *grpc.ClientConn, baseModel string) string {
	datasets := datav1.NewDatasetServiceClient(connection)
	type message map[string]string
	row, err := json.Marshal(map[string][]message{"messages": {
		{"role": "user", "content": question},
		{"role": "assistant", "content": answer},
	}})
	check(err)
	uploadID := upload(ctx, datasets, append(row, '\n'))
	created, err := datasets.CreateDataset(ctx, &datav1.CreateDatasetRequest{
		RequestId: newID(),
		Source: &datav1.DatasetSource{Source: &datav1.DatasetSource_Upload{
			Upload: &datav1.UploadSource{UploadId: uploadID, Format: datav1.FileFormat_FILE_FORMAT_JSONL},
		}},
		Steps: []*datav1.DatasetStep{
			{Step: &datav1.DatasetStep_SetTemplate{SetTemplate: &datav1.TemplateConfig{BaseModel: baseModel}}},
			{Step: &datav1.DatasetStep_Encode{Encode: &datav1.EncodeStep{}}},
		},
	})
	check(err)
	opened, err := datav1.NewLoaderServiceClient(connection).OpenLoader(ctx, &datav1.OpenLoaderRequest{
		RequestId: newID(),
		DatasetId: created.Dataset.DatasetId,
		BatchSize: 1,
	})
	check(err)
	return opened.Loader.LoaderId
}

// Uploads a file as a header and chunks, and returns the id of the upload.
func upload(ctx context.Context, datasets datav1.DatasetServiceClient, file []byte) string {
	digest := sha256.Sum256(file)
	header := &datav1.UploadHeader{UploadId: newID(), SizeBytes: int64(len(file)), Sha256: digest[:]}
	stream, err := datasets.Upload(ctx)
	check(err)
	check(stream.Send(&datav1.UploadRequest{Part: &datav1.UploadRequest_Header{Header: header}}))
	for offset := 0; offset < len(file); offset += chunkBytes {
		end := offset + chunkBytes
		if end > len(file) {
			end = len(file)
		}
		chunk := &tensorv1.TensorChunk{Offset: int64(offset), Data: file[offset:end]}
		if err := stream.Send(&datav1.UploadRequest{Part: &datav1.UploadRequest_Chunk{Chunk: chunk}}); err != nil {
			break // The server ended the call, and CloseAndRecv returns its error.
		}
	}
	response, err := stream.CloseAndRecv()
	check(err)
	fmt.Println("uploaded:", response.CommittedBytes)
	return header.UploadId
}

// Trains the adapter with one stream, and returns the version that it publishes at the end.
func train(ctx context.Context, training modelv1.TrainingServiceClient, adapterID, loaderID string) int64 {
	stream, err := training.Train(ctx)
	check(err)
	// Operations run in the order of their numbers. They are sent without waiting, so that the model is never idle.
	go func() {
		for index, operation := range operations(loaderID) {
			operation.AdapterId, operation.SequenceNumber = adapterID, int64(index+1)
			if stream.Send(&modelv1.TrainRequest{Operation: operation}) != nil {
				return // Recv returns the error of the stream.
			}
		}
		stream.CloseSend()
	}()
	var version int64
	fmt.Print("losses:")
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			break
		}
		check(err)
		switch outcome := response.Result.Outcome.(type) {
		case *modelv1.OperationResult_Error:
			log.Fatalf("operation %d failed: %s", response.Result.SequenceNumber, outcome.Error.Message)
		case *modelv1.OperationResult_Forward:
			fmt.Printf(" %.3f", outcome.Forward.Loss/float64(outcome.Forward.LabelCount))
		case *modelv1.OperationResult_Publish:
			version = outcome.Publish.Version
		}
	}
	fmt.Println()
	return version
}

func operations(loaderID string) []*modelv1.Operation {
	// Without a cursor, each step reads the first batch.
	batch := &modelv1.Batch{Source: &modelv1.Batch_Loader{Loader: &modelv1.LoaderBatch{LoaderId: loaderID}}}
	var all []*modelv1.Operation
	for step := 0; step < steps; step++ {
		all = append(all,
			&modelv1.Operation{Verb: &modelv1.Operation_ForwardBackward{
				ForwardBackward: &modelv1.ForwardBackward{Batch: batch},
			}},
			&modelv1.Operation{Verb: &modelv1.Operation_ClipGradAndStep{
				ClipGradAndStep: &modelv1.ClipGradAndStep{LearningRate: proto.Float64(0.005)},
			}})
	}
	publish := &modelv1.Operation{Verb: &modelv1.Operation_PublishVersion{PublishVersion: &modelv1.PublishVersion{}}}
	return append(all, publish)
}

// Asks an adapter version the question, and prints the answer.
func sample(
	ctx context.Context, samplers samplerv1.SamplerServiceClient, baseModel string, adapter *samplerv1.AdapterRef,
) {
	stream, err := samplers.Sample(ctx, &samplerv1.SampleRequest{
		BaseModel: baseModel,
		Adapter:   adapter,
		Prompt:    prompt(),
		Params:    &samplerv1.SamplingParams{MaxTokens: proto.Int32(40), Temperature: proto.Float64(0)},
	})
	check(err)
	var text strings.Builder
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			break
		}
		check(err)
		text.WriteString(response.GetDelta().GetText() + response.GetFinished().GetText())
	}
	fmt.Println("sampled:", text.String())
}

func prompt() *samplerv1.Prompt {
	message := &datav1.Message{
		Role:  datav1.Role_ROLE_USER,
		Parts: []*datav1.ContentPart{{Part: &datav1.ContentPart_Text{Text: question}}},
	}
	chat := &samplerv1.ChatPrompt{Trajectory: &datav1.Trajectory{Messages: []*datav1.Message{message}}}
	return &samplerv1.Prompt{Content: &samplerv1.Prompt_Chat{Chat: chat}}
}

// Sends an invalid request, and prints the reason and the field of the error.
func refuse(ctx context.Context, adapters modelv1.AdapterServiceClient, baseModel string) {
	_, err := adapters.CreateAdapter(ctx, &modelv1.CreateAdapterRequest{
		RequestId:  newID(),
		BaseModel:  baseModel,
		LoraConfig: &modelv1.LoraConfig{LoraRank: proto.Int32(-1)},
	})
	var reason, field string
	for _, detail := range status.Convert(err).Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			reason = detail.Reason
		case *errdetails.BadRequest:
			field = detail.FieldViolations[0].Field
		}
	}
	fmt.Println("refused:", reason, field)
}

// Watches the load, which never ends, until the deadline of the call.
func statusAtDeadline(ctx context.Context, samplers samplerv1.SamplerServiceClient) string {
	ctx, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancel()
	stream, err := samplers.WatchLoad(ctx, &samplerv1.WatchLoadRequest{})
	for err == nil {
		_, err = stream.Recv()
	}
	return nameOf(err)
}

// Cancels a long answer after its first tokens. Cancelling a call also ends its work at the sampler.
func statusAfterCancel(ctx context.Context, samplers samplerv1.SamplerServiceClient, baseModel string) string {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := samplers.Sample(ctx, &samplerv1.SampleRequest{
		BaseModel: baseModel,
		Prompt:    prompt(),
		Params:    &samplerv1.SamplingParams{IsEosIgnored: true},
	})
	for err == nil {
		_, err = stream.Recv()
		cancel()
	}
	return nameOf(err)
}

// Returns the name of a status as the documentation of gRPC writes it. Go's own names have other spellings.
func nameOf(err error) string {
	switch code := status.Code(err); code {
	case codes.Canceled:
		return "CANCELLED"
	case codes.DeadlineExceeded:
		return "DEADLINE_EXCEEDED"
	default:
		return code.String()
	}
}

func newID() string {
	id := make([]byte, 16)
	_, err := rand.Read(id)
	check(err)
	return hex.EncodeToString(id)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
